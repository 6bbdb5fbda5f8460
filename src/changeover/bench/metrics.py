"""From answers to figures: one function a metric, each with its formula beside it in the result.

The same word means different things in different tools (guidellm's TPOT counts the first token, its ITL is
what others call TPOT; vLLM's ITL is the gap between chunks, however many tokens they hold), so the formulas
travel with the numbers, under ``METRIC_SCHEMA``. Times are in seconds. A figure that the data does not give
is None and named, with its reason, in ``missing``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from changeover.bench.acceptance import Acceptance, pool_acceptance
from changeover.bench.answer import Answer
from changeover.bench.statistics import mean, mean_interval, percentile

METRIC_SCHEMA = 1
FORMULAS = {
    "output_tok_s": "sum of usage.completion_tokens of successful requests / seconds of the repeat",
    "request_s": "successful requests / seconds of the repeat",
    "seconds": "from the start of the repeat to the end of its last response",
    "ttft_s": "t_first - t_sent; t_first: first chunk that carries tokens (an empty role chunk does not)",
    "tpot_s": "(t_last - t_first) / (n_out - n_first_chunk); n_first_chunk: tokens in the first chunk",
    "chunk_gap_s": "time between successive chunks that carry tokens, however many tokens each holds",
    "e2e_s": "t_end - t_sent; t_end: the response has ended",
    "sched_lag_s": "t_sent - t_planned; the client's own delay",
    "tokens_per_chunk": "sum of usage.completion_tokens / chunks that carry tokens",
    "acceptance.length": "1 + accepted_tokens / drafts, by the server's counters, after less before",
    "t_sent": "last byte of the request handed to the socket",
    "t_last": "last chunk that carries tokens or the finish reason",
    "mean intervals": "95 %, Student t over the repeats",
}
# Beyond these the figures say more about the client than about the server.
MAX_SCHED_LAG_S = 0.010
MAX_LAG_SHARE_OF_TTFT = 0.05
MAX_LOOP_LAG_S = 0.050
MAX_CPU_SHARE = 0.90
SUMMARISED = ("output_tok_s", "request_s", "ttft_s", "tpot_s", "e2e_s")


@dataclass(frozen=True)
class Repeat:
    """All that one repeat at one concurrency gave; ``started_s`` is on the clock of the answers."""

    repeat: int
    concurrency: int
    started_s: float
    seconds: float
    answers: tuple[Answer, ...]
    acceptance: Acceptance | None
    acceptance_missing: str | None
    loop_lags_s: tuple[float, ...]
    cpu_s: float


@dataclass(frozen=True)
class Timing:
    """The metrics of one successful answer; ``missing`` says why any of them is None."""

    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    sched_lag_s: float
    chunk_gaps_s: tuple[float, ...]
    first_chunk_tokens: int | None
    missing: dict[str, str]


def time_answer(answer: Answer) -> Timing:
    """The timing of an answer that succeeded (``failure`` None, hence sent)."""
    assert answer.sent_s is not None
    arrivals = answer.arrivals
    missing = {}
    ttft_s = tpot_s = None
    first_tokens = first_chunk_tokens(answer)
    if not arrivals:
        missing["ttft_s"] = missing["tpot_s"] = "no chunk carried tokens"
    else:
        ttft_s = arrivals[0].at_s - answer.sent_s
        assert answer.last_s is not None
        if answer.output_tokens is None:
            missing["tpot_s"] = "the server sent no usage"
        elif first_tokens is None:
            missing["tpot_s"] = "the tokens of the first chunk are unknown (no usage in it)"
        elif answer.output_tokens <= first_tokens:
            missing["tpot_s"] = "all tokens came in the first chunk"
        else:
            tpot_s = (answer.last_s - arrivals[0].at_s) / (answer.output_tokens - first_tokens)
    return Timing(
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=answer.ended_s - answer.sent_s,
        sched_lag_s=answer.sent_s - answer.planned_s,
        chunk_gaps_s=tuple(b.at_s - a.at_s for a, b in pairwise(arrivals)),
        first_chunk_tokens=first_tokens,
        missing=missing,
    )


def first_chunk_tokens(answer: Answer) -> int | None:
    """Tokens in the first chunk: as the server counted, or 1 where there are as many chunks as tokens."""
    if not answer.arrivals:
        return None
    counted = answer.arrivals[0].output_tokens
    if counted:
        return counted
    return 1 if answer.output_tokens == len(answer.arrivals) else None


def describe(values: Sequence[float]) -> dict[str, float | int] | None:
    """n, mean, percentiles and maximum of some seconds; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    shares = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
    quantiles = {name: percentile(ordered, share) for name, share in shares.items()}
    return {"n": len(ordered), "mean": mean(ordered), **quantiles}


def summarise_repeat(repeat: Repeat) -> dict[str, Any]:
    """The JSON of one repeat."""
    good = [answer for answer in repeat.answers if answer.failure is None]
    timings = [time_answer(answer) for answer in good]
    missing: dict[str, str] = {}
    for timing in timings:
        for name, reason in timing.missing.items():
            missing.setdefault(name, f"{reason}, in some of {len(good)} answers")
    output_tokens = _total([answer.output_tokens for answer in good])
    if output_tokens is None:
        without = sum(answer.output_tokens is None for answer in good)
        missing["output_tok_s"] = f"{without} of {len(good)} answers came without usage"
    if repeat.acceptance_missing is not None:
        missing["acceptance"] = repeat.acceptance_missing
    chunks = sum(len(answer.arrivals) for answer in good)
    ttft_s = describe([timing.ttft_s for timing in timings if timing.ttft_s is not None])
    sched_lag_s = describe([timing.sched_lag_s for timing in timings])
    loop_lag_s = describe(repeat.loop_lags_s)
    cpu_share = repeat.cpu_s / repeat.seconds
    return {
        "repeat": repeat.repeat,
        "seconds": repeat.seconds,
        "requests": count_requests(repeat.answers),
        "output_tok_s": None if output_tokens is None else output_tokens / repeat.seconds,
        "request_s": len(good) / repeat.seconds,
        "prompt_tokens": _total([answer.prompt_tokens for answer in good]),
        "cached_tokens": _total([answer.cached_tokens for answer in good]),
        "output_tokens": output_tokens,
        "tokens_per_chunk": output_tokens / chunks if output_tokens is not None and chunks else None,
        "ttft_s": ttft_s,
        "tpot_s": describe([timing.tpot_s for timing in timings if timing.tpot_s is not None]),
        "e2e_s": describe([timing.e2e_s for timing in timings]),
        "chunk_gap_s": describe([gap for timing in timings for gap in timing.chunk_gaps_s]),
        "acceptance": None if repeat.acceptance is None else repeat.acceptance.to_json(),
        "acceptance_by_request": [
            None
            if answer.speculation is None
            else [answer.speculation.drafts, answer.speculation.accepted_tokens]
            for answer in repeat.answers
        ],
        "client": {"sched_lag_s": sched_lag_s, "loop_lag_s": loop_lag_s, "cpu_share": cpu_share},
        "validity": judge_client(sched_lag_s, loop_lag_s, cpu_share, ttft_s),
        "missing": missing,
        "output_hashes": [None if answer.failure else answer.text_hash for answer in repeat.answers],
    }


def count_requests(answers: Sequence[Answer]) -> dict[str, Any]:
    """Requests sent, ok and failed; the failures by reason, each with how often and one example."""
    reasons: dict[str, dict[str, Any]] = {}
    for answer in answers:
        if answer.failure is not None:
            entry = reasons.setdefault(answer.failure.reason, {"count": 0, "example": answer.failure.detail})
            entry["count"] += 1
    failed = sum(entry["count"] for entry in reasons.values())
    return {"sent": len(answers), "ok": len(answers) - failed, "failed": failed, "reasons": reasons}


def judge_client(
    sched_lag_s: dict[str, float | int] | None,
    loop_lag_s: dict[str, float | int] | None,
    cpu_share: float,
    ttft_s: dict[str, float | int] | None,
) -> dict[str, Any]:
    """Whether the client itself was fast enough for its figures to be the server's."""
    reasons = []
    if sched_lag_s is not None:
        lag = sched_lag_s["p99"]
        if lag > MAX_SCHED_LAG_S:
            reasons.append(f"sched_lag_s p99 is {lag * 1000:.1f} ms (limit {MAX_SCHED_LAG_S * 1000:.0f} ms)")
        if ttft_s is not None and lag > MAX_LAG_SHARE_OF_TTFT * ttft_s["p50"]:
            share = MAX_LAG_SHARE_OF_TTFT
            reasons.append(f"sched_lag_s p99 is {lag * 1000:.1f} ms, more than {share:.0%} of ttft_s p50")
    if loop_lag_s is not None and loop_lag_s["p99"] > MAX_LOOP_LAG_S:
        reasons.append(
            f"loop_lag_s p99 is {loop_lag_s['p99'] * 1000:.1f} ms (limit {MAX_LOOP_LAG_S * 1000:.0f} ms)"
        )
    if cpu_share > MAX_CPU_SHARE:
        reasons.append(f"the client used {cpu_share:.0%} of a core (limit {MAX_CPU_SHARE:.0%})")
    return {"valid": not reasons, "reasons": reasons}


def summarise_level(repeats: Sequence[dict[str, Any]], distinct_prompts: int) -> dict[str, Any]:
    """Each headline metric over the repeats of a level: the mean of the run means with its interval; and the
    pooled acceptance, its interval over the ``distinct_prompts`` of the load.
    """
    summary: dict[str, Any] = {}
    for name in SUMMARISED:
        runs = run_means(repeats, name)
        if runs is None:
            summary[name] = {"mean": None, "interval": None, "reason": "missing in a repeat"}
            continue
        estimate = mean_interval(runs)
        interval = None if estimate.low is None else [estimate.low, estimate.high]
        summary[name] = {
            "mean": estimate.value,
            "interval": interval,
            "reason": None if interval else "no interval: one repeat",
        }
    summary["acceptance"] = pool_acceptance(repeats, distinct_prompts)
    return summary


def run_means(repeats: Sequence[dict[str, Any]], name: str) -> list[float] | None:
    """One number a repeat (a distribution gives its mean); None when any repeat lacks it."""
    values = [_run_mean(repeat[name]) for repeat in repeats]
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None


def _run_mean(value: dict[str, float] | float | None) -> float | None:
    return value["mean"] if isinstance(value, dict) else value


def _total(counts: Sequence[int | None]) -> int | None:
    """The sum, or None when any is unknown: nothing is guessed."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
