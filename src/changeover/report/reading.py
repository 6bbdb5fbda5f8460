"""Looking into JSON that other rooms wrote, without trusting its shape.

A report must render a journal of another version, of a run that died, or with a key missing; what is not
there is ``None`` here and is named as absent on the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# Nothing that a run measures is larger (an exabyte has 1e18 bytes); beyond it arithmetic may overflow.
LARGEST = 1e18


def dig(value: Any, *path: str) -> Any:
    """The value at ``path`` in nested mappings, or None where any step is missing."""
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def first(value: Any, *paths: str) -> Any:
    """The first of several dotted paths that is there and not None."""
    for path in paths:
        found = dig(value, *path.split("."))
        if found is not None:
            return found
    return None


def number(value: Any) -> float | None:
    """A finite number up to ``LARGEST``, or None; booleans and numbers in strings are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > LARGEST:
        return None
    return float(value) if math.isfinite(value) else None


def whole(value: Any) -> int | None:
    """A whole number, or None."""
    found = number(value)
    return int(found) if found is not None else None


def text(value: Any) -> str | None:
    """A string that is not empty; numbers are spelled out, everything else is None."""
    if isinstance(value, str):
        return value or None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return str(value)


def mapping(value: Any) -> Mapping[str, Any]:
    """A mapping, or an empty one."""
    return value if isinstance(value, Mapping) else {}


def sequence(value: Any) -> Sequence[Any]:
    """A list or tuple, or an empty one; a string is not a sequence here."""
    return value if isinstance(value, list | tuple) else ()


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """The mappings in a list; other things in it are passed over."""
    return [item for item in sequence(value) if isinstance(item, Mapping)]


def interval(value: Any) -> tuple[float, float] | None:
    """A confidence interval spelled as ``[low, high]`` or ``{"low", "high"}``."""
    if isinstance(value, Mapping):
        low, high = number(value.get("low")), number(value.get("high"))
    else:
        ends = sequence(value)
        low, high = (number(ends[0]), number(ends[1])) if len(ends) == 2 else (None, None)
    return (low, high) if low is not None and high is not None else None
