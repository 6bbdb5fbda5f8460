"""Who watches a changeover, and what is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from changeover.machine.protocol import Delivery
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
