"""SIGTERM as a question that the training loop asks between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Within it SIGTERM only sets a flag; yields the function that reads it. Outside the main thread nothing
    is caught, because Python allows no handler there.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def note(signum: int, frame: FrameType | None) -> None:
        asked.set()

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGTERM, before)
