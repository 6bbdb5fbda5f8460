"""Row charts: labelled rows over one shared axis (timelines, percentiles, ratios)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from changeover.report.svg import Axis, element, joined, tick_anchor

# Pixels above a phase's row in templates/report.css.
PHASE_GAP = 4
# The width of a row's marks on a screen of 400 px, and of a character of a label.
NARROWEST_PX = 300
CHARACTER_PX = 6.6


@dataclass(frozen=True)
class Row:
    """One row of a row chart: a label (may be Markup) and marks placed in per cent of the axis."""

    label: str
    marks: Markup
    kind: str = ""


def row_chart(
    rows: Sequence[Row], axis: Axis, *, name: str, height: int = 22, reference: float | None = None
) -> Markup:
    """Rows with labels over one shared axis; ``reference`` is a value marked through all rows."""
    lines = [
        element(
            "div",
            element("div", row.label, class_="label")
            + element(
                "svg",
                _grid(axis, height, reference, PHASE_GAP if row.kind == "phase" else 0) + row.marks,
                width="100%",
                height=height,
                role="img",
                aria_label=_plain(row.label),
            ),
            class_=f"row {row.kind}".strip(),
        )
        for row in rows
    ]
    ticks = [
        element(
            "text",
            axis.spell(tick),
            x=axis.percent(tick),
            y=14,
            class_=f"tick {tick_anchor(axis.share(tick))}",
        )
        for tick in axis.ticks
    ]
    foot = element(
        "div",
        element("div", axis.label, class_="label unit")
        + element("svg", joined(ticks), width="100%", height=20, aria_hidden="true"),
        class_="row axis",
    )
    return element("div", joined([*lines, foot]), class_="rows", role="group", aria_label=name)


def _grid(axis: Axis, height: int, reference: float | None, above: int) -> Markup:
    """Vertical lines at the ticks; ``above`` closes the gap to the row before."""
    lines = [
        element("line", x1=at, x2=at, y1=-above, y2=height, class_="grid")
        for at in (axis.percent(tick) for tick in axis.ticks)
    ]
    if reference is not None:
        at = axis.percent(reference)
        lines.append(element("line", x1=at, x2=at, y1=-above, y2=height, class_="reference"))
    return joined(lines)


def _plain(label: str) -> str:
    return label.striptags() if isinstance(label, Markup) else label


def bar(
    axis: Axis, low: float, high: float, *, colour: str, title: str, top: float = 4, height: float = 14
) -> Markup:
    """A rectangle from ``low`` to ``high``; never thinner than 2 px, so that short things stay visible."""
    start, end = axis.share(low), axis.share(high)
    return element(
        "rect",
        element("title", title),
        x=f"{start * 100:.3f}%",
        y=top,
        width=f"{max(end - start, 0.0) * 100:.3f}%",
        height=height,
        rx=1.5,
        class_=f"bar {colour}",
    )


def beside(axis: Axis, low: float, high: float, words: str, *, y: float = 15.5) -> Markup:
    """A label right of a bar, or left of it, or over its end: wherever there is room on the narrowest screen."""
    start, end = axis.share(low), axis.share(high)
    needed = (len(words) * CHARACTER_PX + 8) / NARROWEST_PX
    if end + needed <= 1:
        return element("text", words, x=f"{end * 100:.3f}%", dx=6, y=y, class_="value")
    if start - needed >= 0:
        return element("text", words, x=f"{start * 100:.3f}%", dx=-6, y=y, class_="value end")
    return element(
        "text", words, x=f"{max(end, min(1, needed)) * 100:.3f}%", dx=-6, y=y, class_="value end inside"
    )


def dot(axis: Axis, value: float, *, colour: str, title: str, radius: float = 4, y: float = 11) -> Markup:
    return element(
        "circle", element("title", title), cx=axis.percent(value), cy=y, r=radius, class_=f"mark {colour}"
    )


def whisker(axis: Axis, low: float, high: float, *, colour: str, y: float = 11) -> Markup:
    """A horizontal line from ``low`` to ``high``."""
    return element(
        "line", x1=axis.percent(low), x2=axis.percent(high), y1=y, y2=y, class_=f"whisker {colour}"
    )


def notch(axis: Axis, value: float, *, colour: str, title: str, y: float = 11, half: float = 4) -> Markup:
    """A short vertical mark, for a percentile on a whisker."""
    at = axis.percent(value)
    mark = {"x1": at, "x2": at, "y1": y - half, "y2": y + half, "class_": f"notch {colour}"}
    return element("line", element("title", title), **mark)
