"""Two benchmark results against each other: how many times A is B, with an interval, or a refusal.

The unit of the statistics is the repeat, not the request: requests of one repeat share the machine's mood,
and an interval over them would be far too narrow. Each metric gives one mean a repeat; the ratio of the
geometric means has a Welch interval on the logarithms. Repeats of one server start do not show how two starts
would differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from changeover.bench.acceptance import pool_acceptance
from changeover.bench.metrics import METRIC_SCHEMA, run_means
from changeover.bench.statistics import ratio_interval
from changeover.machine.errors import InvalidInput

SCHEMA_VERSION = 1
METHOD = (
    "ratio B/A of the geometric means of the repeats; 95 % interval by Welch's t on the logarithms of the "
    "repeats' means; a difference is said only when the interval excludes 1"
)
# Metric -> whether more of it is better.
METRICS = {"output_tok_s": True, "ttft_s": False, "tpot_s": False, "e2e_s": False}
MUST_AGREE = (
    "prompts_sha256",
    "api",
    "max_tokens",
    "temperature",
    "seed",
    "ignore_eos",
    "requests",
    "concurrency",
)
NO_INTERVAL = "no interval: one repeat"


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two results of :func:`changeover.bench.run.bench`; A is the baseline.

    Raises:
        InvalidInput: the two did not carry the same load or not the same metrics; names each difference.
    """
    refuse_unlike(a, b)
    levels = [compare_level(a, b, of_a, of_b) for of_a, of_b in zip(a["levels"], b["levels"], strict=True)]
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "compare",
        "metric_schema": METRIC_SCHEMA,
        "method": METHOD,
        "a": _side(a),
        "b": _side(b),
        "load": a["load"],
        "levels": levels,
        "sentence": sentence(levels),
        "caveats": caveats(a, b),
    }


def refuse_unlike(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Raise InvalidInput when the two cannot be compared."""
    differences = [
        f"{name} is {a['load'].get(name)!r} in A and {b['load'].get(name)!r} in B"
        for name in MUST_AGREE
        if a["load"].get(name) != b["load"].get(name)
    ]
    if a["metric_schema"] != b["metric_schema"]:
        differences.append(f"metric_schema is {a['metric_schema']} in A and {b['metric_schema']} in B")
    if differences:
        raise InvalidInput(
            expected="two benchmarks of the same load",
            seen="; ".join(differences),
            todo="Run both with the same prompts and settings.",
        )


def compare_level(
    a: Mapping[str, Any], b: Mapping[str, Any], of_a: Mapping[str, Any], of_b: Mapping[str, Any]
) -> dict[str, Any]:
    """One level: each metric's ratio, the acceptance of each side, how many outputs are the same."""
    metrics = {
        name: compare_runs(run_means(of_a["repeats"], name), run_means(of_b["repeats"], name), more_is_better)
        for name, more_is_better in METRICS.items()
    }
    return {
        "concurrency": of_a["concurrency"],
        **metrics,
        "acceptance": {
            "a": pool_acceptance(of_a["repeats"], a["load"]["distinct_prompts"]),
            "b": pool_acceptance(of_b["repeats"], b["load"]["distinct_prompts"]),
        },
        "outputs_equal": compare_outputs(of_a["repeats"], of_b["repeats"], a["load"]["temperature"]),
    }


def compare_runs(
    a: Sequence[float] | None, b: Sequence[float] | None, more_is_better: bool
) -> dict[str, Any]:
    """Ratio B/A, its interval and verdict: faster, slower, not distinguishable, or no interval and why."""
    unknown: dict[str, Any] = {
        "a": None,
        "b": None,
        "ratio": None,
        "interval": None,
        "verdict": "no interval",
    }
    if a is None or b is None:
        return {**unknown, "reason": f"missing in a repeat of {'A' if a is None else 'B'}"}
    means = {"a": sum(a) / len(a), "b": sum(b) / len(b)}
    if min(*a, *b) <= 0:
        return {**unknown, **means, "reason": "a repeat's mean is zero"}
    estimate = ratio_interval(a, b)
    found: dict[str, Any] = {**means, "ratio": estimate.value, "interval": None}
    if estimate.low is None or estimate.high is None:
        return {**found, "verdict": "no interval", "reason": NO_INTERVAL}
    found["interval"] = [estimate.low, estimate.high]
    if estimate.low <= 1.0 <= estimate.high:
        return {**found, "verdict": "not distinguishable", "reason": None}
    return {
        **found,
        "verdict": "faster" if (estimate.low > 1.0) == more_is_better else "slower",
        "reason": None,
    }


def compare_outputs(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], temperature: float
) -> dict[str, Any]:
    """The share of requests with the same text on both sides, repeat by repeat, and of each side with itself.

    Greedy speculation must not change the output; what differs within one side (batches change the order of
    floating-point sums) is the floor that the share between the sides is read against.
    """
    if temperature != 0:
        return {
            "share": None,
            "same": None,
            "of": None,
            "reason": "only greedy outputs can be expected to agree",
        }
    same, of = _count_same([(x, y) for x, y in zip(a, b, strict=False)])
    if of == 0:
        return {"share": None, "same": 0, "of": 0, "reason": "no request succeeded on both sides"}
    return {
        "share": same / of,
        "same": same,
        "of": of,
        "reason": None,
        "a_with_itself": _share_with_itself(a),
        "b_with_itself": _share_with_itself(b),
    }


def _share_with_itself(repeats: Sequence[Mapping[str, Any]]) -> float | None:
    same, of = _count_same([(repeats[0], later) for later in repeats[1:]])
    return same / of if of else None


def _count_same(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> tuple[int, int]:
    hashes = [
        (x, y)
        for first, second in pairs
        for x, y in zip(first["output_hashes"], second["output_hashes"], strict=True)
        if x is not None and y is not None
    ]
    return sum(x == y for x, y in hashes), len(hashes)


def sentence(levels: Sequence[Mapping[str, Any]]) -> str:
    """The result in words, by output tokens a second."""
    return "; ".join(_clause(level) for level in levels) + "."


def _clause(level: Mapping[str, Any]) -> str:
    where = "single-stream" if level["concurrency"] == 1 else f"at {level['concurrency']}"
    found = level["output_tok_s"]
    if found["ratio"] is None:
        return f"nothing can be said {where} ({found['reason']})"
    times = f"{found['ratio']:.2f} times A"
    if found["interval"] is None:
        return f"B is {times} {where} ({found['reason']})"
    interval = f"95 % interval {found['interval'][0]:.2f} to {found['interval'][1]:.2f}"
    if found["verdict"] == "not distinguishable":
        return f"no difference shown {where} ({times}, {interval})"
    return f"B is {times} {where} ({interval})"


def caveats(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing the ratios."""
    found = []
    if a["server"]["model"] != b["server"]["model"]:
        found.append(f"the models' names differ: {a['server']['model']} and {b['server']['model']}")
    if a["load"].get("cache_salt") != b["load"].get("cache_salt"):
        found.append("only one side kept its repeats out of the prefix cache by a salt")
    tokens = []
    for name, side in (("A", a), ("B", b)):
        repeats = [(level["concurrency"], repeat) for level in side["levels"] for repeat in level["repeats"]]
        found += [f"{name}: {warning}" for warning in side["warnings"]]
        for level, repeat in repeats:
            where = f"{name}, repeat {repeat['repeat']} at {level}"
            if repeat["requests"]["failed"]:
                found.append(
                    f"{where}: {repeat['requests']['failed']} of {repeat['requests']['sent']} requests failed"
                )
            found += [f"{where}: {reason}" for reason in repeat["validity"]["reasons"]]
        counts = [repeat["output_tokens"] for _, repeat in repeats]
        tokens.append(None if None in counts else sum(counts) / len(counts))
    if tokens[0] and tokens[1] and abs(tokens[1] / tokens[0] - 1) > 0.01:
        found.append(
            f"the outputs differ in length: {tokens[0]:.1f} tokens a repeat in A, {tokens[1]:.1f} in B"
        )
    return found


def _side(result: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "server": result["server"],
        "repeats": result["load"]["repeats"],
        "started_wall": result["started_wall"],
    }
