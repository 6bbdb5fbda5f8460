"""Speculative decoding as the server counts it: the difference of ``/metrics`` over one measured repeat.

A lifetime average would hold the warm-up and whatever ran before (sglang#34743), and one data-parallel rank
is not the server, so counters are summed over all label sets and subtracted. Gauges (SGLang's
``spec_accept_length``) cannot be subtracted and are not used: SGLang says in each answer what it drafted and accepted,
and those are added up; where it is too old to say, what it generated and its count of verify steps tell.

How sure a length is shows in how it differs between prompts; for that, a server must say in each answer what it
drafted and accepted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from changeover.bench.statistics import ratio_bootstrap
from changeover.engines.protocol import SpeculationMetrics
from changeover.engines.registry import get_engine

# Prefix of an engine's metric names -> its kind.
PREFIXES = {"changeover": "embedded", "vllm": "vllm", "sglang": "sglang"}
UNKNOWN_ENGINE = "openai"
NO_COUNTERS = SpeculationMetrics(None, None, None)
RESAMPLES = 2_000
SEED = 0
FEWEST_PROMPTS = 5
NO_DRAFT = "the server made no draft in this repeat"
COUNTS = ("drafts", "draft_tokens", "accepted_tokens")
INTERVAL_METHOD = (
    f"95 % interval of the length by percentile bootstrap over prompts: {RESAMPLES:,} resamples, seed {SEED}; a "
    "prompt's counts are summed over its requests and repeats, as they are not independent"
)

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(?P<value>\S+)")


@dataclass(frozen=True)
class Acceptance:
    """What was drafted and accepted, in one repeat or for one request; ``drafts`` counts verify steps.

    ``length`` is tokens a verify step, 1 + accepted / drafts; there is none without a draft. ``draft_tokens`` is None
    where the server does not say how many tokens it drafted.
    """

    drafts: int
    draft_tokens: int | None
    accepted_tokens: int

    @property
    def length(self) -> float:
        return 1.0 + self.accepted_tokens / self.drafts

    @property
    def rate(self) -> float | None:
        """Accepted share of the drafted tokens."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "length": self.length, "rate": self.rate}


def read_counters(text: str) -> dict[str, float]:
    """Every sample of a Prometheus text exposition, summed over its labels (data-parallel ranks, models)."""
    counters: dict[str, float] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        counters[found["name"]] = counters.get(found["name"], 0.0) + value
    return counters


def engine_of(counters: Mapping[str, float]) -> str:
    """Which engine publishes these metrics; ``openai`` when none that we know."""
    for prefix, engine in PREFIXES.items():
        if any(name.startswith(f"{prefix}:") for name in counters):
            return engine
    return UNKNOWN_ENGINE


def speculation_names(engine: str) -> SpeculationMetrics:
    """Under which names an engine, as :func:`engine_of` calls it, counts speculation."""
    return NO_COUNTERS if engine == UNKNOWN_ENGINE else get_engine(engine).speculation


def acceptance_between(
    before: Mapping[str, float], after: Mapping[str, float], names: SpeculationMetrics
) -> tuple[Acceptance | None, str | None]:
    """The acceptance between two readings, or None with the reason why there is none."""
    if names.drafts is None or names.draft_tokens is None or names.accepted_tokens is None:
        gauge = names.acceptance_length
        return None, f"no counters of drafts; only the gauge {gauge}" if gauge else "no counters of drafts"
    if names.drafts not in after:
        return None, f"the server publishes no {names.drafts}"
    deltas = []
    for name in (names.drafts, names.draft_tokens, names.accepted_tokens):
        first, last = before.get(name, 0.0), after.get(name, math.nan)
        if not math.isfinite(last - first):
            return None, f"{name} was {first}, then {last}: not a count"
        if last < first:
            return None, f"{name} went backwards, from {first:.0f} to {last:.0f}: the server was reset"
        deltas.append(round(last - first))
    if deltas[0] == 0:
        return None, NO_DRAFT
    return Acceptance(*deltas), None


def acceptance_of(answers: Sequence[Acceptance | None]) -> tuple[Acceptance | None, str | None]:
    """The acceptance of a repeat from what its answers say, or None with the reason: one that is missing would be a
    sample of a choice that nobody made.
    """
    said = [one for one in answers if one is not None]
    if len(said) < len(answers):
        return (
            None,
            f"{len(answers) - len(said)} of {len(answers)} answers do not say what was drafted for them",
        )
    whole = summed([asdict(one) for one in said])
    return (whole, None) if whole.drafts else (None, NO_DRAFT)


def acceptance_by_steps(
    before: Mapping[str, float],
    after: Mapping[str, float],
    names: SpeculationMetrics,
    output_tokens: Sequence[int | None],
) -> tuple[Acceptance | None, str | None]:
    """From the tokens of each answer and the verify steps between two readings: a request's first token comes from its
    prefill, and a step gives one token and those that it accepts. What a last step accepted beyond the end of an answer
    is not counted, as in SGLang's own acceptance length (``spec_accept_length``, tokens a step).

    None with the reason where somebody else's requests are in the counters, or the server does not count.
    """
    name = names.verify_steps
    if name is None or name not in after:
        return (
            None,
            f"neither do the answers say what was drafted for them, nor does the server publish {name}",
        )
    ours = sum(count or 0 for count in output_tokens)
    generated = generated_between(before, after)
    if None in output_tokens or generated != ours:
        return (
            None,
            f"the server generated {generated} tokens, the answers hold {ours}: not all steps are ours",
        )
    steps = round(after[name] - before.get(name, 0.0))
    if steps <= 0:
        return None, NO_DRAFT
    return Acceptance(steps, None, max(ours - len(output_tokens) - steps, 0)), None


def pool_acceptance(repeats: Sequence[Mapping[str, Any]], distinct_prompts: int) -> dict[str, Any] | None:
    """The acceptance of a level: counts summed over its repeats, and an ``interval`` of the length (or a
    ``reason``); None when any repeat lacks counts.
    """
    parts = [repeat["acceptance"] for repeat in repeats]
    if any(part is None for part in parts):
        return None
    pooled = summed([part for part in parts if part is not None])
    interval, reason = length_interval(
        pooled,
        prompt_counts([repeat.get("acceptance_by_request", ()) for repeat in repeats], distinct_prompts),
    )
    return {
        **pooled.to_json(),
        "interval": interval,
        "interval_method": None if interval is None else INTERVAL_METHOD,
        "reason": reason,
    }


def summed(parts: Sequence[Mapping[str, Any]]) -> Acceptance:
    """The counts of several added up; drafted tokens that one does not say are not known of the whole."""
    drafts, drafted, accepted = ([part[name] for part in parts] for name in COUNTS)
    return Acceptance(sum(drafts), None if None in drafted else sum(drafted), sum(accepted))


def prompt_counts(
    repeats: Sequence[Sequence[Sequence[int] | None]], distinct_prompts: int
) -> list[tuple[int, int]]:
    """(drafts, accepted) of each prompt that has figures, over all repeats; a load cycles its prompts in order."""
    found: dict[int, tuple[int, int]] = {}
    for requests in repeats:
        for index, counts in enumerate(requests):
            if counts is not None:
                drafts, accepted = found.get(index % distinct_prompts, (0, 0))
                found[index % distinct_prompts] = drafts + counts[0], accepted + counts[1]
    return list(found.values())


def length_interval(
    pooled: Acceptance, by_prompt: Sequence[tuple[int, int]]
) -> tuple[list[float] | None, str | None]:
    """[low, high] of the pooled length from each prompt's (drafts, accepted), or None with the reason.

    Figures that do not add up to the server's counters (a request failed half-way, somebody else used the
    server) describe another length than the pooled one, and give no interval.
    """
    if not by_prompt:
        return None, "the server gives no figures per request"
    drafting = [(drafts, accepted) for drafts, accepted in by_prompt if drafts]
    sums = sum(drafts for drafts, _ in drafting), sum(accepted for _, accepted in drafting)
    if sums != (pooled.drafts, pooled.accepted_tokens):
        return None, (
            f"the requests' figures add up to {sums[0]} drafts and {sums[1]} accepted tokens, the server's "
            f"counters to {pooled.drafts} and {pooled.accepted_tokens}"
        )
    if len(drafting) < FEWEST_PROMPTS:
        return None, f"prompts drafted for: {len(drafting)}; an interval needs {FEWEST_PROMPTS}"
    low, high = ratio_bootstrap(drafting, RESAMPLES, SEED)
    return [1.0 + low, 1.0 + high], None


def generated_between(before: Mapping[str, float], after: Mapping[str, float]) -> int | None:
    """Tokens that the server says it generated between two readings, for anybody; None if it does not say."""
    for prefix in PREFIXES:
        name = f"{prefix}:generation_tokens_total"
        first, last = before.get(name), after.get(name)
        if first is not None and last is not None and math.isfinite(last - first) and last >= first:
            return round(last - first)
    return None
