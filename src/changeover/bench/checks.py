"""What can be wrong with a benchmark although it ran: a dead server, other traffic, a prefix cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from changeover.bench.answer import Answer
from changeover.bench.metrics import Repeat, count_requests
from changeover.machine.errors import ChangeoverError

# A first repeat so much slower to the first token than the later ones: those were helped by a prefix cache.
CACHE_SUSPICION = 0.5


def refuse_if_all_failed(repeat: Repeat) -> None:
    """Stop at the first repeat in which nothing succeeded: a dead server is noticed at once, not at the end.

    Raises:
        ChangeoverError: no request of the repeat succeeded.
    """
    counts = count_requests(repeat.answers)
    if counts["ok"]:
        return
    reasons = "; ".join(
        f"{entry['count']} x {name}: {entry['example']}" for name, entry in counts["reasons"].items()
    )
    raise ChangeoverError(
        expected=f"an answer to some request of repeat {repeat.repeat} at concurrency {repeat.concurrency}",
        seen=reasons,
        todo="Look at the server's log; it may have died, refuse the model's name, or be draining.",
    )


def traffic_warnings(server_tokens: int | None, answers: Sequence[Answer], where: str) -> list[str]:
    """A server that generated more than it gave us was busy for somebody else as well."""
    counts = [answer.output_tokens for answer in answers]
    if server_tokens is None or any(answer.failure for answer in answers) or None in counts:
        return []
    ours = sum(count for count in counts if count is not None)
    if server_tokens <= ours * 1.02 + 1:
        return []
    return [f"{where}: the server generated {server_tokens} tokens, {ours} of them for us: it had other work"]


def cache_warnings(levels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Signs that repeats came from the server's prefix cache (vllm#54227: throughput 2.32 times too high)."""
    warnings = []
    for level in levels:
        repeats, at = level["repeats"], f"at concurrency {level['concurrency']}"
        cached, prompt = (
            sum(repeat[name] or 0 for repeat in repeats) for name in ("cached_tokens", "prompt_tokens")
        )
        if prompt and cached > 0.05 * prompt:
            warnings.append(
                f"{at}: {cached / prompt:.0%} of the prompt tokens came from the server's prefix cache"
            )
        firsts = [repeat["ttft_s"]["p50"] for repeat in repeats if repeat["ttft_s"]]
        if len(firsts) > 1 and max(firsts[1:]) < CACHE_SUSPICION * firsts[0]:
            warnings.append(
                f"{at}: ttft_s fell from {firsts[0]:.4f} in repeat 1 to {max(firsts[1:]):.4f} or less: "
                "a prefix cache or a cold start; look at the repeats one by one"
            )
    return warnings
