"""Following a child process: its end, its progress file, and whatever must stay alive meanwhile."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from changeover.machine.progress import Progress
from changeover.pipeline.secrets import without_secrets

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):  # noqa: N818
    """Somebody asked the run to stop (Ctrl-C, SIGTERM, a closed terminal). The machine is cleared first."""


class Interrupts:
    """Turns signals into a question that waits ask at moments of their own choosing: nothing is cut in the middle."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number).name)

    def check(self) -> None:
        """Raise :class:`Interrupted` if somebody has asked."""
        if self.received:
            raise Interrupted(f"asked to stop by {self.received[0]}")


class Tail:
    """New complete lines of a file that another process appends to, from where it stood when following began."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[bytes]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                raw = file.read()
        except FileNotFoundError:
            return []
        end = raw.rfind(b"\n") + 1
        self._offset += end
        return raw[:end].splitlines()


def read_progress(lines: list[bytes]) -> list[Progress]:
    """The observations on these lines; what is not one (a torn write) is left out.

    NaN and Infinity (the loss of a training that diverges) become None: the journal is strict JSON.
    """
    found = []
    for line in lines:
        try:
            progress = Progress(**json.loads(line, parse_constant=lambda _: None))
        except (ValueError, TypeError):
            continue
        if progress.done is not None:
            found.append(progress)
    return found


def log_tail(path: Path, lines: int = 30, most_bytes: int = 32_768) -> str:
    """The last lines of a log, for an error message and the journal: without secrets."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most_bytes))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return without_secrets("\n".join(text.splitlines()[-lines:]))


class Throttle:
    """Lets a call of one ``key`` through at most once in ``period_s``.

    With ``share`` the period grows to that share of the time since the beginning, so that ten hours of progress leave
    a few thousand lines in a journal and not 36,000.
    """

    def __init__(self, now: Callable[[], float], period_s: float, share: float = 0.0) -> None:
        self._now = now
        self._period_s = period_s
        self._share = share
        self._began_s = now()
        self._last: dict[str, float] = {}

    def allows(self, key: str) -> bool:
        now = self._now()
        period_s = max(self._period_s, self._share * (now - self._began_s))
        if now - self._last.get(key, float("-inf")) < period_s:
            return False
        self._last[key] = now
        return True
