"""A changeover of a run: teardown with every stage, signal and sample in the journal, the signal's line before it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from changeover.machine.processes import ProcessIdentity
from changeover.machine.protocol import Delivery, Machine
from changeover.pipeline.journal import Event, EventName, Journal
from changeover.pipeline.spec import TeardownSpec
from changeover.teardown.budgets import Budgets
from changeover.teardown.clear import MachineSample, clear
from changeover.teardown.clearance import Clearance, SignalRecord, StageRecord
from changeover.teardown.footprint import Baseline, Target


class JournalObserver:
    """Writes what a teardown does into the journal of the run that asked for it."""

    def __init__(self, journal: Journal, phase: str) -> None:
        self._journal = journal
        self._phase = phase

    def stage(self, record: StageRecord) -> None:
        self._write(self._journal.append, EventName.CHANGEOVER_STAGE, record.to_json())

    def intent(self, record: SignalRecord) -> None:
        self._write(self._journal.append, EventName.CHANGEOVER_SIGNAL, record.to_json())

    def delivered(self, record: SignalRecord, delivery: Delivery) -> None:
        said = {**record.to_json(), "delivery": delivery.value}
        self._write(self._journal.note, EventName.CHANGEOVER_DELIVERED, said)

    def sample(self, sample: MachineSample) -> None:
        self._write(self._journal.note, EventName.CHANGEOVER_SAMPLE, sample.to_json())

    def started(self, targets: Sequence[Target]) -> None:
        described = {"targets": [target.to_json() for target in targets]}
        self._write(self._journal.append, EventName.CHANGEOVER_STARTED, described)

    def _write(self, write: Callable[..., Event], name: EventName, data: dict[str, Any]) -> None:
        """A full disk must not keep our processes on the GPUs: what cannot be written goes to stderr."""
        try:
            write(name, phase=self._phase, **data)
        except OSError as error:
            print(f"journal: {error}; not written: {name} {data}", file=sys.stderr, flush=True)


def change_over(
    journal: Journal,
    machine: Machine,
    budgets: TeardownSpec,
    phase: str,
    targets: Sequence[Target],
    baseline: Baseline,
    terminated: frozenset[ProcessIdentity] = frozenset(),
) -> Clearance:
    """Clear the targets of a phase and write the clearance down; never raises for what it finds.

    ``terminated`` got SIGTERM from an attempt that was cut off: no second one.
    """
    observer = JournalObserver(journal, phase)
    observer.started(targets)
    clearance = clear(
        machine,
        targets,
        baseline,
        budgets=Budgets(
            total_s=budgets.total_timeout_s,
            drain_s=budgets.drain_timeout_s,
            drain_cap_s=budgets.drain_cap_s,
            terminate_s=budgets.terminate_timeout_s,
            kill_s=budgets.kill_timeout_s,
        ),
        observer=observer,
        terminated=terminated,
    )
    # a clean machine that is not on record is cleared again by a resume; one that is not clean is told in any case
    write = journal.append if clearance.clean else journal.try_append
    write(EventName.CHANGEOVER_CLEARED, phase=phase, clearance=clearance.to_json())
    return clearance
