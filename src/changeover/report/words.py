"""Numbers and times in words: few digits, a unit, and a thin space between thousands."""

from __future__ import annotations

import math
from datetime import UTC, datetime

THIN = "\u202f"
ABSENT = "–"
# Four decimals would claim more than a benchmark on a shared machine can know.
_SIGNIFICANT_DIGITS = 3


def figure(value: float | None, digits: int = _SIGNIFICANT_DIGITS) -> str:
    """``digits`` significant digits, no exponent; whole numbers from 1000 on are grouped by thin spaces."""
    if value is None:
        return ABSENT
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    # log10 says 2.99.. for 999.6, which rounds to four digits: look at the rounded value once more.
    if decimals and round(abs(value), decimals) >= 10 ** (digits - decimals):
        decimals -= 1
    spelled = f"{value:,.{decimals}f}" if decimals < 12 else f"{value:.2e}"
    return spelled.replace(",", THIN)


def tick(value: float) -> str:
    """A round value on an axis, with no more decimals than it needs."""
    return f"{value:,.10g}".replace(",", THIN)


def count(value: float | None) -> str:
    """A whole number with grouped thousands."""
    return ABSENT if value is None else f"{round(value):,}".replace(",", THIN)


def seconds(value: float | None) -> str:
    """``0.42 s``, ``14.2 s``, ``3 min 05 s``, ``2 h 04 min``."""
    if value is None:
        return ABSENT
    if value < 0.0995:
        return f"{value * 1000:.0f}{THIN}ms"
    if value < 9.995:
        return f"{value:.2f}{THIN}s"
    if value < 99.95:
        return f"{value:.1f}{THIN}s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60}{THIN}min {whole % 60:02d}{THIN}s"
    return f"{whole // 3600}{THIN}h {whole % 3600 // 60:02d}{THIN}min"


def clock(value: float) -> str:
    """A place on a time axis: ``40 s``, ``2:30``, ``1:05:00`` after the start."""
    whole = round(value)
    if whole < 60:
        return f"{value:g}{THIN}s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def size(n_bytes: float | None) -> str:
    """Bytes in binary units."""
    if n_bytes is None:
        return ABSENT
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n_bytes) < 1024:
            return f"{count(n_bytes) if unit == 'B' else figure(n_bytes)}{THIN}{unit}"
        n_bytes /= 1024
    return f"{figure(n_bytes)}{THIN}TiB"


def percent(share: float | None) -> str:
    """A share of 1 as per cent; never rounded up to 100 or down to 0."""
    if share is None:
        return ABSENT
    value = share * 100
    if 99.95 <= value < 100 or 0 < value < 0.05:
        return f"{value:.3f}{THIN}%"
    return f"{value:.1f}{THIN}%" if value not in (0, 100) else f"{value:.0f}{THIN}%"


def moment(wall: float | None) -> str:
    """A wall-clock time in UTC, to the second."""
    if wall is None:
        return ABSENT
    try:
        return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return ABSENT
