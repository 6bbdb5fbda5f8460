"""Where events lie on the run's own time, over reboots and clocks that are set back."""

from __future__ import annotations

from collections.abc import Iterable

from changeover.report.reading import number
from changeover.report.view import JournalEvent

BEGINS_SESSION = ("run.started", "run.resumed")


def place_in_time(events: Iterable[JournalEvent]) -> list[tuple[float, JournalEvent]]:
    """Give each event its seconds since the first one.

    Inside one life of the runner the monotonic clock counts (the wall clock may be set back); between two
    lives only the wall clock can, because the monotonic one starts anew with each boot. Times never go back.
    """
    placed: list[tuple[float, JournalEvent]] = []
    first_wall = base_s = base_mono = 0.0
    for event in events:
        wall, mono = number(event.t_wall) or 0.0, number(event.t_mono) or 0.0
        if not placed:
            first_wall, base_s, base_mono = wall, 0.0, mono
        elif event.event in BEGINS_SESSION:
            base_s, base_mono = max(placed[-1][0], wall - first_wall), mono
        t_s = base_s + (mono - base_mono)
        placed.append((max(t_s, placed[-1][0]) if placed else t_s, event))
    return placed
