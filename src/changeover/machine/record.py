"""An append-only record: one JSON object a line, each with a sequence number and a CRC.

An event is on the disk before :meth:`Record.append` returns, so that what was intended (a signal, a start) is known
after ``kill -9``. A last line that was cut off by a crash is dropped when the record is opened again; a bad line
anywhere else is an error, because then the record lies. A run's journal and the audit of a single ``clear`` are both
such records.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from changeover.machine.clock import Clock
from changeover.machine.durable import sync_folder
from changeover.machine.errors import ChangeoverError


@dataclass(frozen=True)
class Event:
    """One line: ``t_wall`` in seconds since 1970, ``t_mono`` in the writer's monotonic seconds."""

    seq: int
    t_wall: float
    t_mono: float
    event: str
    data: dict[str, Any]


class RecordDamaged(ChangeoverError):  # noqa: N818
    """A line in the middle of a record does not say what was written."""

    exit_code = 6


def _canonical(record: dict[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def encode_event(event: Event) -> bytes:
    """One line, newline included; raises ValueError for NaN and Infinity, which strict JSON has not."""
    record: dict[str, Any] = {
        "seq": event.seq,
        "t_wall": event.t_wall,
        "t_mono": event.t_mono,
        "event": event.event,
        "data": event.data,
    }
    record["crc"] = f"{zlib.crc32(_canonical(record)):08x}"
    return _canonical(record) + b"\n"


def decode_event(line: bytes) -> Event | None:
    """The event of a line, or None if the line is not what :func:`encode_event` wrote."""
    try:
        record = json.loads(line)
        crc = record.pop("crc")
        if f"{zlib.crc32(_canonical(record)):08x}" != crc:
            return None
        return Event(record["seq"], record["t_wall"], record["t_mono"], record["event"], record["data"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _scan(raw: bytes, path: Path) -> Iterator[tuple[Event, int]]:
    """The good events with the offset behind each; stops at a torn last line, raises at a bad line before it."""
    offset = 0
    expected_seq = 0
    while offset < len(raw):
        end = raw.find(b"\n", offset)
        line_end = len(raw) if end < 0 else end + 1
        event = decode_event(raw[offset:line_end]) if end >= 0 else None
        if event is None or event.seq != expected_seq:
            if line_end == len(raw):
                return  # torn by a crash: that event was never acknowledged to anybody
            raise RecordDamaged(
                expected=f"event {expected_seq} with a matching CRC at byte {offset} of {path}",
                seen=repr(raw[offset : offset + 80]),
                todo="The record was changed or the disk lost data. Keep the file; see with "
                "`changeover check` what holds the machine and end that by hand, then start a new run.",
            )
        yield event, line_end
        offset = line_end
        expected_seq += 1


def read_events(path: Path) -> list[Event]:
    """All complete events of a record.

    Raises FileNotFoundError if there is none, :class:`RecordDamaged` for a bad line that is not the last.
    """
    return [event for event, _ in _scan(path.read_bytes(), path)]


class Record:
    """The writer. One process writes a record at a time (a lock of the caller's sees to that); its threads may
    share it.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._listeners: list[Callable[[Event], None]] = []
        raw = path.read_bytes() if path.exists() else b""
        good = list(_scan(raw, path))
        self._next_seq = len(good)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._end = good[-1][1] if good else 0
        os.ftruncate(self._fd, self._end)
        sync_folder(path.parent)
        self.events: list[Event] = [event for event, _ in good]

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Call ``listener`` with each event after it has been written."""
        self._listeners.append(listener)

    def append(self, name: str, /, **data: Any) -> Event:
        """Write an event and return when it is on the disk."""
        with self._lock:
            event = self._write(name, data)
            os.fsync(self._fd)
        self._tell(event)
        return event

    def try_append(self, name: str, /, **data: Any) -> None:
        """For the way out: a full disk must keep nobody from clearing the machine. What cannot be written is said."""
        self._try(self.append, name, data)

    def note(self, name: str, /, **data: Any) -> Event:
        """Write an event that a crash of the *machine* may lose: samples and progress, nothing that resume needs."""
        with self._lock:
            event = self._write(name, data)
        self._tell(event)
        return event

    def try_note(self, name: str, /, **data: Any) -> None:
        """:meth:`note`, for the way out."""
        self._try(self.note, name, data)

    def _try(self, write: Callable[..., Event], name: str, data: dict[str, Any]) -> None:
        try:
            write(name, **data)
        except OSError as error:
            print(f"{self._path.name}: {error}; not written: {name} {data}", file=sys.stderr, flush=True)

    def _write(self, name: str, data: dict[str, Any]) -> Event:
        event = Event(self._next_seq, self._clock.wall(), self._clock.monotonic(), str(name), data)
        line = encode_event(event)
        written = os.pwrite(self._fd, line, self._end)
        if written != len(line):  # a full disk: leave no half line for the next event to stand behind
            os.ftruncate(self._fd, self._end)
            raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes could be written", str(self._path))
        self._end += written
        self._next_seq += 1
        self.events.append(event)
        return event

    def _tell(self, event: Event) -> None:
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception as error:  # noqa: BLE001 - a closed terminal, a view's defect: the run goes on without it
                self._listeners.remove(listener)
                if not isinstance(error, OSError):
                    print(f"no view any more: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        os.close(self._fd)
