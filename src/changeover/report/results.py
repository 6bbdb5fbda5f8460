"""What the jobs found, read from their ``result`` objects (bench/run.py, bench/compare.py, drafter/train.py,
states/collect.py). Each reader takes what is there; a figure that is not is None and named on the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from changeover.report.reading import first, interval, mapping, mappings, number, sequence, text, whole
from changeover.report.records import spell

LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
COMPARED = ("output_tok_s", "ttft_s", "tpot_s", "e2e_s")


@dataclass(frozen=True)
class Acceptance:
    """Counts of the server over a measurement; ``length`` = 1 + accepted / drafts, ``interval`` is its 95 % one."""

    length: float | None
    drafts: int | None
    draft_tokens: int | None
    accepted_tokens: int | None
    interval: tuple[float, float] | None

    @property
    def rate(self) -> float | None:
        """Accepted share of the drafted tokens."""
        if not self.draft_tokens or self.accepted_tokens is None:
            return None
        return self.accepted_tokens / self.draft_tokens


@dataclass(frozen=True)
class Estimate:
    """A mean over repeats with its interval, or the reason why there is none."""

    mean: float | None
    interval: tuple[float, float] | None
    reason: str | None


@dataclass(frozen=True)
class Level:
    """One concurrency of a benchmark. Percentiles in seconds, pooled as the median over the repeats."""

    concurrency: int
    repeats: int
    ok: int | None
    failed: int | None
    estimates: Mapping[str, Estimate]
    percentiles: Mapping[str, Mapping[str, float]]
    acceptance: Acceptance | None
    doubts: tuple[str, ...]


@dataclass(frozen=True)
class Bench:
    """A benchmark; ``setting`` says what was sent to which server from which client."""

    levels: tuple[Level, ...]
    formulas: Mapping[str, str]
    setting: Mapping[str, str]
    warnings: tuple[str, ...]

    @property
    def acceptance(self) -> Acceptance | None:
        """Counts summed over the levels (the interval of a single level only); None when any level lacks them."""
        parts = [level.acceptance for level in self.levels]
        if not parts or any(
            part is None or part.drafts is None or part.accepted_tokens is None for part in parts
        ):
            return None
        drafts, drafted, accepted = (
            sum(getattr(part, name) or 0 for part in parts)
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        length = 1 + accepted / drafts if drafts else None
        alone = parts[0].interval if len(parts) == 1 and parts[0] is not None else None
        return Acceptance(length, drafts, drafted, accepted, alone)


@dataclass(frozen=True)
class Ratio:
    """Candidate (B) divided by baseline (A); ``verdict`` in the words of bench/compare.py."""

    ratio: float | None
    interval: tuple[float, float] | None
    verdict: str | None
    reason: str | None


@dataclass(frozen=True)
class ComparedLevel:
    """One concurrency of a comparison; ``outputs`` says how many answers were the same on both sides."""

    concurrency: int
    ratios: Mapping[str, Ratio]
    outputs_share: float | None
    outputs: str


@dataclass(frozen=True)
class Comparison:
    """Two benchmarks against each other."""

    sentence: str | None
    method: str | None
    levels: tuple[ComparedLevel, ...]
    caveats: tuple[str, ...]


def read_acceptance(said: Any) -> Acceptance | None:
    found = mapping(said)
    if not found:
        return None
    return Acceptance(
        length=number(found.get("length")),
        drafts=whole(found.get("drafts")),
        draft_tokens=whole(found.get("draft_tokens")),
        accepted_tokens=whole(found.get("accepted_tokens")),
        interval=interval(found.get("interval")),
    )


def read_bench(result: Mapping[str, Any]) -> Bench:
    levels = [level for said in mappings(result.get("levels")) if (level := _level(said)) is not None]
    setting = {
        f"{part}: {key}": value
        for part in ("server", "load", "client")
        for key, value in mapping(result.get(part)).items()
    }
    return Bench(
        levels=tuple(sorted(levels, key=lambda level: level.concurrency)),
        formulas={str(key): str(value) for key, value in mapping(result.get("formulas")).items()},
        setting={key: found for key, value in setting.items() if (found := spell(value)) is not None},
        warnings=tuple(str(warning) for warning in sequence(result.get("warnings"))),
    )


def _level(said: Mapping[str, Any]) -> Level | None:
    concurrency = whole(said.get("concurrency"))
    if concurrency is None:
        return None
    repeats = mappings(said.get("repeats"))
    summary = mapping(said.get("summary"))
    ok = [number(first(repeat, "requests.ok")) for repeat in repeats]
    failed = [number(first(repeat, "requests.failed")) for repeat in repeats]
    return Level(
        concurrency=concurrency,
        repeats=len(repeats),
        ok=_sum(ok),
        failed=_sum(failed),
        estimates={name: _estimate(summary.get(name)) for name in COMPARED},
        percentiles={name: _percentiles(repeats, name) for name in LATENCIES},
        acceptance=read_acceptance(summary.get("acceptance")),
        doubts=_doubts(repeats),
    )


def _sum(values: list[float | None]) -> int | None:
    known = [value for value in values if value is not None]
    return int(sum(known)) if known and len(known) == len(values) else None


def _estimate(said: Any) -> Estimate:
    found = mapping(said)
    return Estimate(number(found.get("mean")), interval(found.get("interval")), text(found.get("reason")))


def _percentiles(repeats: list[Mapping[str, Any]], name: str) -> Mapping[str, float]:
    """Each percentile as the median over the repeats; the repeats' own are in the result."""
    found: dict[str, float] = {}
    for key in ("p50", "p90", "p95", "p99"):
        values = sorted(v for repeat in repeats if (v := number(first(repeat, f"{name}.{key}"))) is not None)
        if values:
            middle = len(values) // 2
            found[key] = values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2
    return found


def _doubts(repeats: list[Mapping[str, Any]]) -> tuple[str, ...]:
    """Why figures of this level are missing or not to be trusted; each reason once, with its repeats."""
    where: dict[str, list[str]] = {}
    for index, repeat in enumerate(repeats, 1):
        reasons = [str(reason) for reason in sequence(first(repeat, "validity.reasons"))]
        reasons += [f"{name} is missing: {why}" for name, why in mapping(repeat.get("missing")).items()]
        for name, entry in mapping(first(repeat, "requests.reasons")).items():
            example = text(mapping(entry).get("example"))
            times = whole(mapping(entry).get("count"))
            reasons.append(f"{times} failed: {name}" + (f" ({example})" if example else ""))
        for reason in reasons:
            where.setdefault(reason, []).append(str(index))
    return tuple(f"{reason} [repeat {', '.join(indices)}]" for reason, indices in where.items())


def read_comparison(result: Mapping[str, Any]) -> Comparison:
    levels = [found for said in mappings(result.get("levels")) if (found := _compared(said)) is not None]
    return Comparison(
        sentence=text(result.get("sentence")),
        method=text(result.get("method")),
        levels=tuple(sorted(levels, key=lambda level: level.concurrency)),
        caveats=tuple(str(caveat) for caveat in sequence(result.get("caveats"))),
    )


def _compared(said: Mapping[str, Any]) -> ComparedLevel | None:
    concurrency = whole(said.get("concurrency"))
    if concurrency is None:
        return None
    equal = mapping(said.get("outputs_equal"))
    return ComparedLevel(
        concurrency=concurrency,
        ratios={name: _ratio(said.get(name)) for name in COMPARED},
        outputs_share=number(equal.get("share")),
        outputs=_outputs(equal),
    )


def _outputs(equal: Mapping[str, Any]) -> str:
    same, of = whole(equal.get("same")), whole(equal.get("of"))
    if number(equal.get("share")) is None or same is None or of is None:
        return text(equal.get("reason")) or "not compared"
    floors = [number(equal.get("a_with_itself")), number(equal.get("b_with_itself"))]
    own = [
        f"{share:.0%} {side} with itself"
        for side, share in zip("AB", floors, strict=True)
        if share is not None
    ]
    return f"{same} of {of} the same" + (f" ({', '.join(own)})" if own else "")


def _ratio(said: Any) -> Ratio:
    found = mapping(said)
    return Ratio(
        ratio=number(found.get("ratio")),
        interval=interval(found.get("interval")),
        verdict=text(found.get("verdict")),
        reason=text(found.get("reason")),
    )
