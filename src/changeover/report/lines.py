"""Line charts: several series over a numeric x, with axes, units and labels at the lines' ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from changeover.report import words
from changeover.report.svg import Axis, element, joined, tick_anchor

_STRETCH = 1000.0


@dataclass(frozen=True)
class Series:
    """One line. ``colour`` is a class of the style sheet; ``shape`` is ``line`` or ``steps`` (value held)."""

    label: str
    points: tuple[tuple[float, float], ...]
    colour: str
    shape: str = "line"
    markers: bool = False


MOST_POINTS = 240


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> tuple[tuple[float, float], ...]:
    """At most about ``most`` points that draw the same picture.

    Points inside a level stretch are dropped; of the rest, each of ``most / 2`` stretches keeps its lowest
    and its highest point, so that no peak is lost.
    """
    kept = [
        point
        for index, point in enumerate(points)
        if index in (0, len(points) - 1) or not points[index - 1][1] == point[1] == points[index + 1][1]
    ]
    if len(kept) <= most:
        return tuple(kept)
    width = len(kept) / (most // 2)
    found: dict[int, None] = {0: None}
    for bucket in range(most // 2):
        inside = range(int(bucket * width), min(len(kept), int((bucket + 1) * width)))
        ends = (min(inside, key=lambda i: kept[i][1]), max(inside, key=lambda i: kept[i][1]))
        found.update(dict.fromkeys(sorted(ends)))
    found[len(kept) - 1] = None
    return tuple(kept[index] for index in found)


def line_chart(series: Sequence[Series], x: Axis, y: Axis, *, name: str, height: int = 150) -> Markup:
    """Lines over a numeric x; each is labelled at its end when there are several.

    The values travel along as JSON in ``data-series`` for the page's read-out under the pointer.
    """
    shown = [replace(one, points=thin(one.points)) for one in series if one.points]
    parts = [_grid_y(y, height), _ticks_x(x, height)]
    lines = [_path(one, x, y, height) for one in shown]
    parts.append(
        element(
            "svg",
            joined(lines),
            width="100%",
            height=height,
            viewBox=f"0 0 {_STRETCH:.0f} {height}",
            preserveAspectRatio="none",
            class_="stretch",
        )
    )
    parts.extend(_marker(one, point, x, y, height) for one in shown if one.markers for point in one.points)
    if len(shown) > 1:
        parts.extend(_end_labels(shown, y, height))
    data = {
        "x": {"label": x.label, "low": x.low, "high": x.high},
        "series": [
            {
                "label": one.label,
                "shape": one.shape,
                "points": [[_short(a), _short(b)] for a, b in one.points],
            }
            for one in shown
        ],
        "unit": y.label,
    }
    svg = element("svg", joined(parts), width="100%", height=height, role="img", aria_label=name)
    classes = "plot has-end-labels" if len(shown) > 1 else "plot"
    return element("div", svg, class_=classes, data_series=json.dumps(data, separators=(",", ":")))


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _grid_y(y: Axis, height: int) -> Markup:
    parts = [element("text", y.label, x=0, y=-10, class_="unit")]
    for tick in y.ticks:
        at = height * (1 - y.share(tick))
        parts.append(element("line", x1="0", x2="100%", y1=f"{at:.1f}", y2=f"{at:.1f}", class_="grid"))
        parts.append(element("text", y.spell(tick), x=-7, y=f"{at + 4:.1f}", class_="tick end"))
    return joined(parts)


def _ticks_x(x: Axis, height: int) -> Markup:
    parts = [
        element(
            "text",
            x.spell(tick),
            x=x.percent(tick),
            y=height + 17,
            class_=f"tick {tick_anchor(x.share(tick))}",
        )
        for tick in x.ticks
    ]
    parts.append(element("text", x.label, x="50%", y=height + 33, class_="unit mid"))
    return joined(parts)


def _path(series: Series, x: Axis, y: Axis, height: int) -> Markup:
    spots = [(x.share(a) * _STRETCH, height * (1 - y.share(b))) for a, b in series.points]
    words = [f"M{spots[0][0]:.1f} {spots[0][1]:.1f}"]
    for across, down in spots[1:]:
        words.append(f"H{across:.1f}V{down:.1f}" if series.shape == "steps" else f"L{across:.1f} {down:.1f}")
    return element("path", d="".join(words), class_=f"line {series.colour}")


def _marker(series: Series, point: tuple[float, float], x: Axis, y: Axis, height: int) -> Markup:
    across, value = point
    title = element(
        "title", f"{series.label}: {words.figure(value)} {y.label} at {x.spell(across)} {x.label}"
    )
    return element(
        "circle",
        title,
        cx=x.percent(across),
        cy=f"{height * (1 - y.share(value)):.1f}",
        r=3.5,
        class_=f"mark {series.colour}",
    )


def _end_labels(series: Sequence[Series], y: Axis, height: int, gap: float = 14.0) -> list[Markup]:
    """The lines' names beside their last points, pushed apart until none covers another."""
    spots = [(height * (1 - y.share(one.points[-1][1])), one) for one in series]
    spots.sort(key=lambda spot: spot[0])
    placed: list[tuple[float, Series]] = []
    for at, one in spots:
        placed.append((max(at, placed[-1][0] + gap) if placed else at, one))
    overshoot = max(0.0, placed[-1][0] - height) if placed else 0.0
    return [
        element("text", one.label, x="100%", y=f"{at - overshoot + 4:.1f}", dx=8, class_=f"name {one.colour}")
        for at, one in placed
    ]
