"""Which picture shows what: from views to SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from markupsafe import Markup

from changeover.report import words
from changeover.report.lines import Series, line_chart
from changeover.report.rows import Row, bar, beside, dot, notch, row_chart, whisker
from changeover.report.svg import Axis, element, joined, nice_axis, tight_axis, time_ticks
from changeover.report.view import ChangeoverView, JobView, PhaseView, RunView, ServerView, Span

# One colour a role, the same in every picture; classes of templates/report.css.
COLOURS = ("c-1", "c-2", "c-3", "c-4", "c-5")
_STILL_OPEN = "no end recorded"


def time_axis(high_s: float, label: str) -> Axis:
    return Axis(0.0, high_s or 1.0, time_ticks(high_s or 1.0), label, words.clock)


# The run on one time axis


def timeline(run: RunView) -> Markup:
    """Phases, loading, jobs and changeovers of the whole run, in the order in which they began."""
    axis = time_axis(run.span_s, "time since the start")
    rows: list[tuple[float, int, Row]] = []
    for phase in run.phases:
        rows.append((phase.span.start_s, 0, _phase_row(axis, phase, run)))
        rows.extend((s.starting_s, 1, _server_row(axis, s, run)) for s in phase.servers)
        rows.extend((job.span.start_s, 2, _job_row(axis, job, run)) for job in phase.jobs)
    rows.extend((c.span.start_s, 3, _changeover_row(axis, c, run)) for c in run.changeovers)
    for before, after in zip(run.sessions, run.sessions[1:], strict=False):
        stopped_s = before.span.end_s or 0.0
        rows.append((stopped_s, 4, _gap_row(axis, stopped_s, after.span.start_s)))
    rows.sort(key=lambda row: row[:2])
    return row_chart([row for _, _, row in rows], axis, name="Timeline of the run")


def _shown_end(run: RunView, span: Span) -> float:
    """Where a bar ends; what has no end of its own ends with the last line of the runner that began it."""
    if span.end_s is not None:
        return span.end_s
    lives = [life.span for life in run.sessions if life.span.start_s <= span.start_s]
    return max(span.start_s, lives[-1].end_s or run.span_s) if lives else run.span_s


def _length(span: Span, seconds: float | None) -> str:
    return _STILL_OPEN if span.end_s is None else words.seconds(span.seconds if seconds is None else seconds)


def _phase_row(axis: Axis, phase: PhaseView, run: RunView) -> Row:
    start_s, end_s = phase.span.start_s, _shown_end(run, phase.span)
    name = phase.name if phase.attempt == 1 else f"{phase.name} (attempt {phase.attempt})"
    length = _length(phase.span, phase.seconds)
    mark = bar(
        axis,
        start_s,
        end_s,
        colour=f"c-phase is-{phase.state}",
        title=f"{name}: {length}",
        top=9,
        height=4,
    )
    note = f"{length}, failed" if phase.state == "failed" else length
    return Row(name, mark + beside(axis, start_s, end_s, note), "phase")


def _server_row(axis: Axis, server: ServerView, run: RunView) -> Row:
    ready_s = server.ready_s
    end_s = _shown_end(run, Span(server.starting_s, server.stopped_s))
    loaded_s = end_s if ready_s is None else ready_s
    loading = _length(Span(server.starting_s, ready_s), server.ready_seconds)
    note = f"ready after {loading}" if ready_s is not None else "never ready"
    marks = [bar(axis, server.starting_s, loaded_s, colour="c-load", title=note)]
    if ready_s is not None and end_s > ready_s:
        serving = f"serving {words.seconds(end_s - ready_s)}"
        marks.append(bar(axis, ready_s, end_s, colour="c-serve", title=serving, top=16.5, height=1.5))
    marks.append(beside(axis, server.starting_s, loaded_s, note, y=13.5))
    label = " ".join(filter(None, ("server", server.profile)))
    return Row(label, joined(marks), "inner")


def _job_row(axis: Axis, job: JobView, run: RunView) -> Row:
    start_s, end_s = job.span.start_s, _shown_end(run, job.span)
    length = _length(job.span, job.seconds)
    kind = f"{job.name} ({job.kind})" if job.kind and job.kind != job.name else job.name
    note = f"{length}, failed" if job.state == "failed" else length
    mark = bar(axis, start_s, end_s, colour=f"c-job is-{job.state}", title=f"{kind}: {note}")
    return Row(kind, mark + beside(axis, start_s, end_s, note), "inner")


def _changeover_row(axis: Axis, changeover: ChangeoverView, run: RunView) -> Row:
    start_s, end_s = changeover.span.start_s, _shown_end(run, changeover.span)
    length, verdict = _length(changeover.span, changeover.seconds), changeover.verdict.replace("_", " ")
    known = changeover.clearance is not None
    note = f"{length}, {verdict}" if known else _STILL_OPEN
    state = "clean" if changeover.is_clean else "dirty" if known else "unfinished"
    mark = bar(axis, start_s, end_s, colour=f"c-changeover is-{state}", title=note)
    return Row(f"changeover {changeover.number}", mark + beside(axis, start_s, end_s, note), "inner")


def _gap_row(axis: Axis, start_s: float, end_s: float) -> Row:
    note = f"{words.seconds(end_s - start_s)} without a runner"
    mark = bar(axis, start_s, end_s, colour="c-gap", title=note)
    return Row("not running", mark + beside(axis, start_s, end_s, note), "gap")


# A changeover


def stage_chart(changeover: ChangeoverView) -> Markup:
    """The stages one after the other, in seconds."""
    lengths = [stage.seconds or 0.0 for stage in changeover.stages]
    axis = time_axis(max(sum(lengths), changeover.seconds or 0.0), "seconds")
    rows, at = [], 0.0
    for stage, length in zip(changeover.stages, lengths, strict=True):
        note = words.seconds(stage.seconds) + (f", {stage.outcome}" if stage.outcome else "")
        mark = bar(axis, at, at + length, colour=f"c-stage is-{stage.outcome}", title=f"{stage.name}: {note}")
        rows.append(Row(stage.name, mark + beside(axis, at, at + length, note), "inner"))
        at += length
    return row_chart(rows, axis, name=f"Stages of changeover {changeover.number}", height=20)


def sample_charts(changeover: ChangeoverView) -> list[tuple[str, Markup]]:
    """Processes, resident memory and memory of each GPU through the changeover; a title with each chart."""
    samples = changeover.samples
    x = time_axis(max((s.t_s for s in samples), default=0.0), "since the changeover began")
    charts: list[tuple[str, Markup]] = []

    def add(title: str, unit: str, series: list[Series]) -> None:
        values = [value for one in series for _, value in one.points]
        if values:
            y = nice_axis(values, unit, words.tick, about=4)
            y = replace(y, ticks=tuple(tick for tick in y.ticks if tick == round(tick)))
            charts.append((title, line_chart(series, x, y, name=title, height=max(96, 15 * len(series)))))

    processes = tuple((s.t_s, float(s.processes)) for s in samples if s.processes is not None)
    add("Processes of ours", "processes", [Series("processes", processes, "c-3", "steps")])
    rss = tuple((s.t_s, s.rss_mib) for s in samples if s.rss_mib is not None)
    add("Their resident memory", "MiB", [Series("RSS", rss, "c-1")])
    uuids = list(dict.fromkeys(uuid for s in samples for uuid, _ in s.gpus))
    gpus = []
    for index, uuid in enumerate(uuids):
        points = tuple((s.t_s, used) for s in samples for name, used in s.gpus if name == uuid)
        dash = " is-dashed" if index >= len(COLOURS) else ""
        gpus.append(Series(short_uuid(uuid), points, COLOURS[index % len(COLOURS)] + dash))
    add("Memory used on each GPU", "MiB", gpus)
    return charts


def short_uuid(uuid: str) -> str:
    """``GPU-1a2b3c4d-…`` as ``GPU-1a2b3c4d``: enough to tell the GPUs of one box apart."""
    parts = uuid.split("-")
    return "-".join(parts[:2]) if len(parts) > 2 else uuid


# Curves


def curve(
    points: Sequence[tuple[float, float]], *, title: str, x_label: str, y_label: str, colour: str
) -> Markup:
    """One quantity over steps, around its own values."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    ticks = nice_axis(xs, x_label, words.count, about=5).ticks
    x = Axis(
        0.0,
        max(xs),
        tuple(tick for tick in ticks if tick <= max(xs) and tick == round(tick)),
        x_label,
        words.count,
    )
    y = tight_axis(ys, y_label, words.tick, about=4)
    return line_chart([Series(title, tuple(points), colour, markers=len(points) <= 12)], x, y, name=title)


def bars(rates: Sequence[tuple[str, str, float]], *, title: str, label: str) -> Markup:
    """Shares of 1 as bars: (label, colour, share)."""
    axis = Axis(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0), label, lambda share: f"{share * 100:.0f}{words.THIN}%")
    rows = [
        Row(
            name,
            bar(axis, 0, rate, colour=colour, title=words.percent(rate))
            + beside(axis, 0, rate, words.percent(rate)),
        )
        for name, colour, rate in rates
    ]
    return row_chart(rows, axis, name=title)


def ratios(
    levels: Sequence[tuple[str, float, tuple[float, float] | None]], *, title: str, label: str
) -> Markup:
    """Ratios with their intervals around 1: (label, ratio, interval)."""
    values = [1.0] + [end for _, ratio, ends in levels for end in (ratio, *(ends or ()))]
    axis = tight_axis(values, label, lambda value: f"{value:g}×", about=6)
    rows = []
    for name, ratio, ends in levels:
        spelled = f"{ratio:.2f}×" + (f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else ", no interval")
        low, high = ends or (ratio, ratio)
        marks = whisker(axis, low, high, colour="c-2") if ends else Markup("")
        marks += dot(axis, ratio, colour="c-2", title=spelled)
        rows.append(Row(name, marks + beside(axis, low, high, spelled)))
    return row_chart(rows, axis, name=title, reference=1.0)


PERCENTILES = ("p50", "p90", "p95", "p99")


def percentiles(
    rows: Sequence[tuple[str, str, dict[str, float]]], *, title: str, label: str = "milliseconds"
) -> Markup:
    """From the median (dot) to p99, p90 and p95 as notches: (label, colour, percentiles)."""
    axis = nice_axis([value for *_, found in rows for value in found.values()], label, words.tick, about=6)
    drawn = []
    for name, colour, found in rows:
        marks = whisker(axis, min(found.values()), max(found.values()), colour=colour)
        for key in PERCENTILES:
            if key not in found:
                continue
            said = f"{key} {words.figure(found[key])} ms"
            if key == "p50":
                marks += dot(axis, found[key], colour=colour, title=said)
            else:
                marks += notch(axis, found[key], colour=colour, title=said)
        most = max(found, key=lambda key: found[key])
        median = words.figure(found.get("p50"))
        spelled = f"{median} to {words.figure(found[most])}"
        drawn.append(Row(name, marks + beside(axis, min(found.values()), max(found.values()), spelled)))
    return row_chart(drawn, axis, name=title)


def throughput(sides: Sequence[tuple[str, str, Sequence[tuple[float, float]]]], *, title: str) -> Markup:
    """Output tokens per second over concurrency: (label, colour, points)."""
    xs = sorted({x for *_, points in sides for x, _ in points})
    ys = [y for *_, points in sides for _, y in points]
    x = Axis(0.0, max(xs) if xs else 1.0, tuple(xs), "concurrent requests", words.count)
    y = nice_axis(ys, "tok/s", words.tick)
    series = [Series(name, tuple(points), colour, markers=True) for name, colour, points in sides]
    return line_chart(series, x, y, name=title, height=190)


def swatch(colour: str) -> Markup:
    """A small square of a colour, for a table's head."""
    square = element("rect", x=0, y=0, width=10, height=10, rx=2, class_=f"bar {colour}")
    return element("svg", square, width=10, height=10, aria_hidden="true", class_="swatch")
