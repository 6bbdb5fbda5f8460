"""Time for each stage, out of one total."""

from __future__ import annotations

from dataclasses import dataclass

from changeover.machine.errors import InvalidInput


@dataclass(frozen=True)
class Budgets:
    """Most seconds a stage may take; every stage ends earlier by proof.

    Defaults: 60 s for SIGTERM and for SIGKILL are SGLang's own CI figures, 15 s for orphans vLLM's; 120 s
    for GPU memory since deferred closes return it after the process is gone; 60 s for ports, 30 being known
    to be too short on GB300. As in Kubernetes, one total is shared and SIGTERM always keeps a floor (2 s).
    """

    total_s: float = 600.0
    drain_s: float = 60.0
    drain_cap_s: float = 300.0
    terminate_s: float = 60.0
    kill_s: float = 60.0
    orphans_s: float = 15.0
    tracker_s: float = 1.0
    gpu_release_s: float = 120.0
    ports_s: float = 60.0
    probe_s: float = 10.0
    core_dump_s: float = 60.0
    foreign_patience_s: float = 2.0
    sample_s: float = 0.25
    clean_samples: int = 3
    tolerance_mib: float = 32.0

    def __post_init__(self) -> None:
        if self.total_s <= 0 or self.sample_s <= 0 or self.clean_samples < 1:
            raise InvalidInput(
                expected="budgets with total_s > 0, sample_s > 0 and clean_samples >= 1",
                seen=f"total_s={self.total_s}, sample_s={self.sample_s}, clean_samples={self.clean_samples}",
                todo="Give a positive total; the stages share it.",
            )

    def kept_for_later_s(self, stage: str) -> float:
        """Seconds of the total that a stage must leave to those after it.

        Small totals are shared out in the same proportions.
        """
        at_most_s, share = _KEPT.get(stage, (0.0, 0.0))
        return min(at_most_s, share * self.total_s)


_TERMINATE_FLOOR_S = 2.0
_KILL_FLOOR_S = 5.0
_VERIFY_FLOOR_S = 8.0
_KEPT = {
    "drain": (_TERMINATE_FLOOR_S + _KILL_FLOOR_S + _VERIFY_FLOOR_S, 0.6),
    "wait": (_KILL_FLOOR_S + _VERIFY_FLOOR_S, 0.5),
    "orphans": (_VERIFY_FLOOR_S + 2.0, 0.4),
    "kill": (_VERIFY_FLOOR_S, 0.3),
    "tracker": (_VERIFY_FLOOR_S - 1.0, 0.25),
}
