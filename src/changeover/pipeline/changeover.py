"""A changeover of a run: teardown with every stage, signal and sample in the journal, the signal's line before it."""

from __future__ import annotations

from collections.abc import Sequence

from changeover.machine.processes import ProcessIdentity
from changeover.machine.protocol import Machine
from changeover.pipeline.journal import EventName, Journal
from changeover.pipeline.spec import TeardownSpec
from changeover.teardown.budgets import Budgets
from changeover.teardown.clear import clear
from changeover.teardown.clearance import Clearance
from changeover.teardown.footprint import Baseline, Target
from changeover.teardown.observer import RecordObserver


class JournalObserver(RecordObserver):
    """Writes what a teardown does into the journal of the run that asked for it."""

    def __init__(self, journal: Journal, phase: str) -> None:
        super().__init__(journal, "changeover", phase=phase)

    def started(self, targets: Sequence[Target]) -> None:
        described = [target.to_json() for target in targets]
        self._record.try_append(EventName.CHANGEOVER_STARTED, **self._about, targets=described)


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
