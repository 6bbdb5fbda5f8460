"""The audit of a single ``clear``: what was asked, every stage, every signal before it is sent, and the clearance.

One file a clear, below ``$XDG_STATE_HOME/changeover/audit`` (default ``~/.local/state``), in the format of
:mod:`changeover.machine.record`. A run's teardowns are in its journal instead.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Any

from changeover.machine.clock import Clock
from changeover.machine.folders import state_folder
from changeover.machine.processes import ProcessIdentity
from changeover.machine.protocol import Machine
from changeover.machine.record import Record, RecordDamaged, read_events
from changeover.teardown.clearance import Clearance
from changeover.teardown.observer import RecordObserver, terminated_by

_PREFIX = "clear"
ASKED, DELIVERED, CLEARED = f"{_PREFIX}.asked", f"{_PREFIX}.delivered", f"{_PREFIX}.cleared"
_ENDED = f'"event":"{CLEARED}"'.encode()  # as the last line says it, so that the rest need not be read
_LOOKED_BACK = 50  # audits: enough for a bad day, and each is a few kB


def audit_folder() -> Path:
    return state_folder("audit")


def new_audit_id() -> str:
    """Sorts by time: ``20261201T065502-3fa9c1``."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


class Audit(RecordObserver):
    """The writer of one audit, and the observer of its teardown."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.close(descriptor)
        super().__init__(Record(path, clock), _PREFIX)

    def asked(self, machine: Machine, what: dict[str, Any]) -> None:
        """The first line; ``what`` is the wish with the trees that were shown."""
        self._record.try_append(ASKED, boot_id=machine.boot_id, pid=machine.pid, **what)

    def cleared(self, clearance: Clearance) -> None:
        self._record.try_append(CLEARED, clearance=clearance.to_json())

    def close(self) -> None:
        self._record.close()


def terminated_before(folder: Path, boot_id: str) -> frozenset[ProcessIdentity]:
    """Who got SIGTERM, since this boot, from a clear that did not come to its end (``kill -9``, a lost machine)."""
    found: frozenset[ProcessIdentity] = frozenset()
    for path in sorted(folder.glob("*.jsonl"))[-_LOOKED_BACK:]:
        try:
            if _ENDED in path.read_bytes().rstrip().rpartition(b"\n")[2]:
                continue
            events = read_events(path)
        except (OSError, RecordDamaged):
            continue
        asked = next((event for event in events if event.event == ASKED), None)
        if asked is not None and asked.data["boot_id"] == boot_id:
            delivered = (event.data for event in events if event.event == DELIVERED)
            found |= {one for data in delivered if (one := terminated_by(data, boot_id)) is not None}
    return found
