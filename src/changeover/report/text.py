"""The run as Markdown: for a terminal, a pull request, a message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from changeover.report import words
from changeover.report.build import build_view
from changeover.report.digest import Digest, digest
from changeover.report.tables import concurrent, host
from changeover.report.view import JournalEvent, Span

_ENDS = {
    "done": "done",
    "failed": "FAILED",
    "interrupted": "INTERRUPTED",
    "unfinished": "no end recorded: still going, or its runner died",
}


def render_text(events: Iterable[JournalEvent]) -> str:
    """The summary of a run in Markdown, whatever state it is in; ends with a newline."""
    d = digest(build_view(events))
    parts = [_head(d), _findings(d), _phases(d), _changeovers(d), _benchmarks(d)]
    return "\n".join(line for part in parts for line in [*part, ""]).rstrip() + "\n"


def summary(events: Iterable[JournalEvent]) -> dict[str, Any]:
    """The same as JSON values: what a script asks a run for."""
    d = digest(build_view(events))
    speed = d.speed
    return {
        "schema_version": 1,
        "run_id": d.run.run_id,
        "name": d.run.name,
        "state": d.run.state,
        "reason": d.run.reason,
        "exit_code": d.run.exit_code,
        "seconds": d.total_seconds,
        "changeover_seconds": d.changeover_seconds,
        "changeovers": [
            {"phase": c.after, "verdict": c.verdict if c.clearance else None, "seconds": c.seconds}
            for c in d.run.changeovers
        ],
        "speed": speed
        and {
            "concurrency": speed[0],
            "ratio": speed[1].ratio,
            "interval": speed[1].interval and list(speed[1].interval),
        },
        "acceptance_length": {"measured": d.measured_acceptance, "simulated": d.simulated_acceptance},
    }


def _cell(value: Any) -> str:
    """Text for a table cell: one line, no cell borders of its own, no markup."""
    flat = " ".join(str(value).split())
    return flat.replace("|", "\\|").replace("<", "&lt;")


def _table(head: list[str], rows: list[list[Any]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return lines + ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]


def _head(d: Digest) -> list[str]:
    run = d.run
    lines = [f"# {_cell(run.name or 'Unnamed run')}: {_ENDS[run.state]}", ""]
    lines.append(
        f"Run `{_cell(run.run_id or 'id not recorded')}` on {_cell(host(d))}, "
        f"started {words.moment(run.started_wall)}, {words.seconds(d.total_seconds)}."
    )
    if run.reason:
        lines.append(f"Reason: {_cell(run.reason)}")
    for phase in d.failed_phases:
        lines.append(f"Phase {_cell(phase.name)} failed: {_cell(phase.reason or 'no reason recorded')}")
    for job in d.failed_jobs:
        reason = _cell(job.reason or "no reason recorded")
        lines.append(f"Job {_cell(job.phase)}/{_cell(job.name)} failed: {reason}")
    if len(run.sessions) > 1:
        lines.append(f"Resumed {len(run.sessions) - 1} time(s).")
    return lines + [_cell(remark) for remark in run.remarks]


def _findings(d: Digest) -> list[str]:
    lines = []
    if d.speed and d.speed[1].ratio is not None:
        level, ratio = d.speed
        ends = ratio.interval
        said = f"95 % interval {ends[0]:.2f} to {ends[1]:.2f}" if ends else ratio.reason or "no interval"
        lines.append(
            f"- Speed: **{ratio.ratio:.2f}×** the baseline's output tok/s, {concurrent(level)} ({said})"
        )
    else:
        lines.append("- Speed: not known (no comparison has finished)")
    measured, simulated = (
        "not known" if length is None else f"**{length:.2f}**"
        for length in (d.measured_acceptance, d.simulated_acceptance)
    )
    lines.append(f"- Acceptance length: measured {measured}, simulated {simulated}")
    total = len(d.run.changeovers)
    if not total:
        return [*lines, "- Changeovers: none has begun"]
    spent = "time not known" if d.changeover_seconds is None else words.seconds(d.changeover_seconds)
    return [*lines, f"- Changeovers: {d.clean_count} of {total} proved the machine clean, {spent} in all"]


def _phases(d: Digest) -> list[str]:
    rows: list[list[Any]] = []
    for phase in d.run.phases:
        name = phase.name if phase.attempt == 1 else f"{phase.name} (attempt {phase.attempt})"
        rows.append([name, "", phase.state, _length(phase.seconds, phase.span)])
        for server in phase.servers:
            ready = "never ready" if server.ready_s is None else "ready"
            rows.append(["", f"server {server.profile or ''}", ready, words.seconds(server.ready_seconds)])
        rows += [
            ["", f"{job.name} ({job.kind or 'kind not recorded'})", job.state, _length(job.seconds, job.span)]
            for job in phase.jobs
        ]
    if not rows:
        return ["No phase has started."]
    return ["## Phases", "", *_table(["phase", "part", "state", "time"], rows)]


def _length(seconds: float | None, span: Span) -> str:
    return "no end recorded" if seconds is None and span.end_s is None else words.seconds(seconds)


def _changeovers(d: Digest) -> list[str]:
    if not d.run.changeovers:
        return []
    rows: list[list[Any]] = []
    for c in d.run.changeovers:
        signals = ", ".join(f"{s.signal} to {s.pid}" for s in c.signals) or "none"
        rows.append([c.number, c.after, c.verdict, _length(c.seconds, c.span), signals])
    lines = ["## Changeovers", "", *_table(["", "after", "verdict", "time", "signals"], rows)]
    for c in d.dirty:
        for e in c.clearance.evidence if c.clearance else ():
            if e.verdict != "clean":
                said = f"{e.item}: {e.verdict}; expected {e.expected}; saw {e.seen}"
                lines += ["", f"Changeover {c.number}, {_cell(said)}"]
    return lines


def _benchmarks(d: Digest) -> list[str]:
    if not d.sides:
        return ["No benchmark has finished."]
    rows: list[list[Any]] = []
    for side in d.sides:
        for level in side.bench.levels:
            found = level.estimates["output_tok_s"]
            ends = (
                f"{words.figure(found.interval[0])} to {words.figure(found.interval[1])}"
                if found.interval
                else "-"
            )
            medians = [level.percentiles[name].get("p50") for name in ("ttft_s", "tpot_s")]
            length = level.acceptance.length if level.acceptance else None
            rows.append(
                [
                    side.label,
                    level.concurrency,
                    words.figure(found.mean),
                    ends,
                    *(words.figure(None if value is None else value * 1000) for value in medians),
                    "-" if length is None else f"{length:.2f}",
                    words.count(level.failed),
                ]
            )
    head = [
        "benchmark",
        "concurrent",
        "tok/s",
        "95 % interval",
        "TTFT p50 ms",
        "TPOT p50 ms",
        "acceptance",
        "failed",
    ]
    lines = ["## Benchmarks", "", *_table(head, rows)]
    for job, comparison in d.comparisons:
        lines += ["", f"{_cell(job.name)}: {_cell(comparison.sentence or 'no sentence recorded')}"]
    return lines
