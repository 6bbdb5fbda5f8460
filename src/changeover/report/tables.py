"""What stands in the page's tables and rows: from a digest to labels, colours and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from changeover.report import words
from changeover.report.digest import Digest, Side
from changeover.report.findings import Training, words_of
from changeover.report.reading import dig, first, mapping, mappings, sequence, text
from changeover.report.records import spell
from changeover.report.results import Comparison, Level
from changeover.report.view import JobView, ServerView

Facts = list[tuple[str, str]]
_NOT_RECORDED = "not recorded"


def host(d: Digest) -> str:
    """The host in one line."""
    said = d.run.host
    if not isinstance(said, Mapping):
        return text(said) or _NOT_RECORDED
    name = text(first(said, "hostname", "name", "node"))
    cores = text(first(said, "cpus", "cpu_count", "cores"))
    memory = first(said, "memory_gib")
    gpus = sequence(said.get("gpus"))
    parts = [name, f"{cores} CPUs" if cores else None]
    parts.append(f"{words.figure(float(memory))} GiB memory" if isinstance(memory, int | float) else None)
    parts.append(f"{len(gpus)} GPUs" if gpus else None)
    return ", ".join(part for part in parts if part) or spell(said) or _NOT_RECORDED


def phases_planned(d: Digest) -> int:
    """Phases of the pipeline, or those that have started where the journal holds no pipeline."""
    planned = mappings(dig(d.run.spec, "phases"))
    return len(planned) or len({phase.name for phase in d.run.phases})


def provenance(d: Digest) -> Facts:
    """Versions, model, machine and process of the run."""
    run = d.run
    facts: Facts = [
        (f"version of {name}", spell(value) or _NOT_RECORDED) for name, value in run.versions.items()
    ]
    if not facts:
        facts.append(("versions", _NOT_RECORDED))
    model = first(run.spec, "model.path", "model")
    facts.append(("model asked for", spell(model) or _NOT_RECORDED))
    facts.append(("model sha256", model_hash(d) or _NOT_RECORDED))
    facts += [
        (f"model {words_of(name)}", said)
        for name, value in run.model.items()
        if (said := _model_fact(name, value))
    ]
    facts.append(("host", spell(run.host) or _NOT_RECORDED))
    for index, session in enumerate(run.sessions, 1):
        pid = session.pid if session.pid is not None else _NOT_RECORDED
        facts.append((f"runner {index}", f"pid {pid}, boot {session.boot_id or _NOT_RECORDED}"))
    return facts


def _model_fact(name: str, value: Any) -> str | None:
    return None if name == "sha256" else spell(value)


def model_hash(d: Digest) -> str | None:
    """The target's hash: from the run's own facts, else from any job that recorded it."""
    if found := text(d.run.model.get("sha256")):
        return found
    for source in (mapping(d.run.spec), *(job.result or job.params for job in d.run.jobs)):
        found = text(first(source, "model.sha256", "model_sha256", "target.sha256", "manifest.model.sha256"))
        if found:
            return found
    return None


def compared(d: Digest, job: JobView, role: str) -> str:
    """Which benchmark is a comparison's ``baseline`` (A) or ``candidate`` (B), as the pipeline names it."""
    for phase in mappings(dig(d.run.spec, "phases")):
        if phase.get("name") == job.phase:
            for asked in mappings(phase.get("jobs")):
                if asked.get("name", asked.get("kind")) == job.name and (found := text(asked.get(role))):
                    return found
    return text(job.params.get(role)) or _NOT_RECORDED


def ratios(comparison: Comparison) -> list[tuple[str, float, tuple[float, float] | None]]:
    """Rows of the ratio chart: output tok/s by concurrency."""
    rows = []
    for level in comparison.levels:
        found = level.ratios["output_tok_s"]
        if found.ratio is not None:
            rows.append((concurrent(level.concurrency), found.ratio, found.interval))
    return rows


def concurrent(level: int) -> str:
    return "single-stream" if level == 1 else f"{level} concurrent"


def throughput(d: Digest) -> list[tuple[str, str, list[tuple[float, float]]]]:
    """Lines of the throughput chart, one a benchmark."""
    lines = []
    for side in d.sides:
        means = [(level.concurrency, level.estimates["output_tok_s"].mean) for level in side.bench.levels]
        points = [(float(concurrency), mean) for concurrency, mean in means if mean is not None]
        if points:
            lines.append((side.label, side.colour, points))
    return lines


def percentile_rows(d: Digest, metric: str) -> list[tuple[str, str, dict[str, float]]]:
    """Rows of a latency chart in milliseconds, the benchmarks of one concurrency beside each other."""
    levels = sorted({level.concurrency for side in d.sides for level in side.bench.levels})
    rows = []
    for concurrency in levels:
        for side in d.sides:
            for level in side.bench.levels:
                found = {name: value * 1000 for name, value in level.percentiles[metric].items()}
                if level.concurrency == concurrency and found:
                    rows.append((f"{concurrency} · {side.label}", side.colour, found))
    return rows


def acceptance_rows(d: Digest) -> list[tuple[Side, Level]]:
    return [(side, level) for side in d.sides for level in side.bench.levels if level.acceptance is not None]


def doubts(side: Side) -> list[str]:
    """Warnings of a benchmark and of its levels."""
    of_levels = [f"at {level.concurrency}: {doubt}" for level in side.bench.levels for doubt in level.doubts]
    return [*side.bench.warnings, *of_levels]


def has_failures(side: Side) -> bool:
    return any(level.failed for level in side.bench.levels)


def formulas(d: Digest) -> dict[str, str]:
    """The formulas that the benchmarks carry; of two that differ, both, with the benchmark's name."""
    found: dict[str, str] = {}
    for side in d.sides:
        for name, formula in side.bench.formulas.items():
            if found.setdefault(name, formula) != formula:
                found[f"{name} ({side.label})"] = formula
    return found


def acceptance_facts(d: Digest, training: Training) -> Facts:
    """Simulated and measured acceptance length and how far apart they are."""
    simulated, measured = training.acceptance_length, d.measured_acceptance
    ends = training.acceptance_interval
    facts: Facts = [
        ("simulated", _NOT_RECORDED if simulated is None else _with_interval(simulated, ends)),
        (
            "measured",
            "no speculative server was benchmarked"
            if measured is None
            else _with_interval(measured, d.measured.interval if d.measured is not None else None),
        ),
    ]
    if simulated and measured is not None:
        facts.append(("difference", f"{(measured / simulated - 1) * 100:+.1f}{words.THIN}%"))
    if training.draft_tokens is not None:
        facts.append(("draft tokens", str(training.draft_tokens)))
    return facts


def _with_interval(length: float, ends: tuple[float, float] | None) -> str:
    return f"{length:.3f}" + (f" (95 % interval {ends[0]:.3f} to {ends[1]:.3f})" if ends else "")


def step_rows(training: Training) -> list[tuple[str, str, float]]:
    """Rows of the chart by draft step; a step that no draft reached has no rate and no row."""
    rates = enumerate(training.step_rates, 1)
    return [(f"step {index}", "c-2", rate) for index, rate in rates if rate is not None]


def server_facts(server: ServerView) -> Facts:
    """How a server was started and how long it loaded."""
    ready_s = server.ready_seconds
    if ready_s is None and server.ready_s is not None:
        ready_s = server.ready_s - server.starting_s
    last = server.loading[-1] if server.loading else None
    loaded = _NOT_RECORDED
    if last is not None:
        total = f" of {_amount(last.total, last.unit)}" if last.total is not None else ""
        loaded = f"{last.stage or 'loading'}: {_amount(last.done, last.unit)}{total}"
    return [
        ("engine", server.engine or _NOT_RECORDED),
        ("profile", server.profile or _NOT_RECORDED),
        ("ready after", words.seconds(ready_s) if ready_s is not None else "never ready"),
        ("last loading progress", loaded),
        ("address", server.url or _NOT_RECORDED),
        ("ports", _listed(server.ports)),
        ("leader", f"pid {server.pid}" if server.pid is not None else _NOT_RECORDED),
        ("log", server.log or _NOT_RECORDED),
    ]


def _amount(value: float | None, unit: str | None) -> str:
    if unit == "bytes":
        return words.size(value)
    return f"{words.count(value)} {unit or ''}".strip()


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(spell(value) or words.ABSENT for value in values) or _NOT_RECORDED
