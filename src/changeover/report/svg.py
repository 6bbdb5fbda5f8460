"""Small charts as inline SVG that stay readable at any width.

Lengths along x are per cent, heights and text are in CSS pixels, so a narrow screen gets a narrower plot
and not smaller letters. Lines (:mod:`changeover.report.lines`) lie in a nested, stretched ``svg`` whose
strokes do not scale. Colours are classes (``c-…``), so that the style sheet can follow the reader's screen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape


def element(tag: str, content: str = "", **attributes: object) -> Markup:
    """One element; ``_`` in a name stands for ``-``; what is not Markup is escaped."""
    spelled = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{spelled}>{escape(content)}</{tag}>")  # noqa: S704 - both parts are escaped above


def joined(parts: Sequence[Markup]) -> Markup:
    return Markup("").join(parts)


def nice_ticks(low: float, high: float, about: int = 5) -> tuple[float, ...]:
    """Round values around ``low`` to ``high``, in steps of 1, 2 or 5 times a power of ten."""
    # A range that floating point can hardly divide is drawn as one value.
    if not high - low > 1e-9 * max(abs(low), abs(high), 1e-9):
        high = low + (abs(low) if abs(low) > 1e-9 else 1.0)
    raw = (high - low) / max(1, about - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    decimals = max(0, 1 - math.floor(math.log10(step)))
    return tuple(round(index * step, decimals) for index in range(first, last + 1))


def time_ticks(high_s: float, about: int = 8) -> tuple[float, ...]:
    """Ticks of a time axis from 0, in steps that people count in; the last one is at or below ``high_s``."""
    steps = (
        0.1,
        0.2,
        0.5,
        1,
        2,
        5,
        10,
        15,
        30,
        60,
        120,
        300,
        600,
        900,
        1800,
        3600,
        7200,
        21600,
        43200,
        86400,
    )
    step = next((step for step in steps if high_s / step <= about), math.ceil(high_s / about / 86400) * 86400)
    return tuple(round(index * step, 6) for index in range(int(high_s / step + 1e-9) + 1))


@dataclass(frozen=True)
class Axis:
    """A linear scale; ``spell`` writes a tick."""

    low: float
    high: float
    ticks: tuple[float, ...]
    label: str
    spell: Callable[[float], str]

    def share(self, value: float) -> float:
        """0 to 1 along the axis, held inside it."""
        width = self.high - self.low
        return min(1.0, max(0.0, (value - self.low) / width)) if width > 0 else 0.0

    def percent(self, value: float) -> str:
        return f"{self.share(value) * 100:.3f}%"


def nice_axis(values: Sequence[float], label: str, spell: Callable[[float], str], *, about: int = 5) -> Axis:
    """An axis from 0 (or below, if values are) to a round number above the values."""
    ticks = nice_ticks(min([0.0, *values]), max([*values, 0.0]) or 1.0, about)
    return Axis(ticks[0], ticks[-1], ticks, label, spell)


def tight_axis(values: Sequence[float], label: str, spell: Callable[[float], str], *, about: int = 5) -> Axis:
    """An axis around the values, for quantities whose zero means nothing to the reader (a loss, a ratio)."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    ticks = nice_ticks(low, high, about)
    return Axis(ticks[0], ticks[-1], ticks, label, spell)


def tick_anchor(share: float) -> str:
    """The text anchor class of a tick label at ``share`` of an axis; the first must not stick out left."""
    return "start" if share <= 0.02 else "mid"
