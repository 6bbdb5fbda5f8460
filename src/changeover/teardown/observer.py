"""Who watches a changeover, and what is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from changeover.machine.processes import ProcessIdentity
from changeover.machine.protocol import Delivery
from changeover.machine.record import Record
from changeover.teardown.clearance import SignalRecord, StageRecord


@dataclass(frozen=True)
class MachineSample:
    """What the targets held at one moment, ``t_s`` seconds after the start of the changeover."""

    t_s: float
    processes: int
    rss_mib: float
    gpus: tuple[tuple[str, float], ...]  # (uuid, used MiB); empty where not read this time

    def to_json(self) -> dict[str, Any]:
        return {
            "t_s": round(self.t_s, 3),
            "processes": self.processes,
            "rss_mib": round(self.rss_mib, 1),
            "gpus": [{"uuid": uuid, "used_mib": round(used, 1)} for uuid, used in self.gpus],
        }


class Observer(Protocol):
    """Who writes it down. ``intent`` returns only when the line is on disk: the signal follows it, and then
    ``delivered`` says what became of it.
    """

    def stage(self, record: StageRecord) -> None: ...

    def intent(self, record: SignalRecord) -> None: ...

    def delivered(self, record: SignalRecord, delivery: Delivery) -> None: ...

    def sample(self, sample: MachineSample) -> None: ...


class RecordObserver:
    """Writes it into a record, as ``<prefix>.stage``, ``.signal``, ``.delivered`` and ``.sample``, each with ``about``.

    A full disk must not keep processes on the GPUs: what cannot be written goes to stderr.
    """

    def __init__(self, record: Record, prefix: str, **about: Any) -> None:
        self._record = record
        self._prefix = prefix
        self._about = about

    def stage(self, record: StageRecord) -> None:
        self._record.try_append(f"{self._prefix}.stage", **self._about, **record.to_json())

    def intent(self, record: SignalRecord) -> None:
        self._record.try_append(f"{self._prefix}.signal", **self._about, **record.to_json())

    def delivered(self, record: SignalRecord, delivery: Delivery) -> None:
        said = {**record.to_json(), "delivery": delivery.value}
        self._record.try_note(f"{self._prefix}.delivered", **self._about, **said)

    def sample(self, sample: MachineSample) -> None:
        self._record.try_note(f"{self._prefix}.sample", **self._about, **sample.to_json())


def terminated_by(delivered: Mapping[str, Any], boot_id: str) -> ProcessIdentity | None:
    """Who got SIGTERM by a ``.delivered`` event's data, or None. An intent alone is none: whoever wrote it died before
    the signal.
    """
    if delivered["signal"] != "SIGTERM" or delivered["delivery"] != Delivery.SENT.value:
        return None
    return ProcessIdentity(delivered["pid"], delivered["start_ticks"], boot_id)


class SilentObserver:
    """For callers who read the clearance only."""

    def stage(self, record: StageRecord) -> None:
        pass

    def intent(self, record: SignalRecord) -> None:
        pass

    def delivered(self, record: SignalRecord, delivery: Delivery) -> None:
        pass

    def sample(self, sample: MachineSample) -> None:
        pass
