"""Bytes and minutes that a phase will need: arithmetic only, each figure with the numbers that it is made of."""

from __future__ import annotations

from dataclasses import dataclass

BF16_BYTES = 2
CHARACTERS_PER_TOKEN = 4  # a usual figure for English prose; only used where the user gives no token count
DISK_MARGIN = 0.1  # file systems slow down, and estimates err, before a disk is full


@dataclass(frozen=True)
class Estimate:
    """A figure with where it comes from; ``value`` None where nothing was given to make it from."""

    value: float | None
    basis: str


def states_bytes(tokens: int, hidden: int, aux_boundaries: int) -> int:
    """Bytes of uncompressed bf16 states: the auxiliary vectors and the last one, for every token, no padding."""
    return tokens * (aux_boundaries + 1) * hidden * BF16_BYTES


def expected_tokens(prompt_characters: int, samples: int, max_tokens: int) -> int:
    """At most so many tokens: the prompts by their length, every answer as long as allowed."""
    return prompt_characters // CHARACTERS_PER_TOKEN + samples * max_tokens


def minutes(amount: float, unit: str, rate_per_s: float | None, rate_name: str) -> Estimate:
    """Minutes for ``amount`` at a rate of the user's, or None with the name of the missing rate."""
    if rate_per_s is None:
        return Estimate(None, f"unknown: give estimates.{rate_name}")
    return Estimate(amount / rate_per_s / 60, f"{amount:,.0f} {unit} at {rate_per_s:,.0f} a second")


def disk_refusal(needed_bytes: int, reserve_bytes: int, free_bytes: int, where: str) -> str | None:
    """Why so many bytes will not fit, or None where they do with a margin of 10 %."""
    wanted = int(needed_bytes * (1 + DISK_MARGIN)) + reserve_bytes
    if wanted <= free_bytes:
        return None
    return (
        f"disk: expected {gib(wanted)} free at {where} ({gib(needed_bytes)} of states, 10 % margin, "
        f"{gib(reserve_bytes)} reserve); saw {gib(free_bytes)}. Collect fewer samples, or put --runs-dir on a "
        "larger disk."
    )


def gib(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB"
