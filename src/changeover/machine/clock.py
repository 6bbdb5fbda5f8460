"""Time as a thing that is passed in, so that no test sleeps and no deadline depends on the wall clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where every wait in Changeover takes its time from."""

    def monotonic(self) -> float:
        """Seconds that never go backwards; for every duration and deadline."""
        ...

    def wall(self) -> float:
        """Seconds since 1970; for people and logs only."""
        ...

    def sleep(self, seconds: float) -> None:
        """Give the processor away; the caller looks again afterwards and never counts on the time."""
        ...


class SystemClock:
    """The machine's own clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
