"""What a long action says of itself while it runs; the same for loading, collecting, training and benchmarking."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Progress:
    """One observation of a long action.

    ``done`` and ``total`` are in ``unit`` (``total`` is None where nobody knows it); ``detail`` holds the
    figures worth showing beside it, by their metric names (``loss``, ``tokens_per_s`` ...).
    """

    stage: str
    done: float
    total: float | None
    unit: str
    detail: Mapping[str, float | int | str | None] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "done": self.done,
            "total": self.total,
            "unit": self.unit,
            "detail": dict(self.detail),
        }


ProgressSink = Callable[[Progress], None]


def ignore_progress(_: Progress) -> None:
    """The sink for callers who do not watch."""
