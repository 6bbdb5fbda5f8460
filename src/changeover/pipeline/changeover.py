"""A changeover of a run: teardown with every stage, signal and sample in the journal, the signal's line before it."""

from __future__ import annotations

from collections.abc import Sequence

from changeover.pipeline.context import RunContext
from changeover.pipeline.journal import EventName, Journal
from changeover.teardown.clear import MachineSample, clear
from changeover.teardown.clearance import Clearance, SignalRecord, StageRecord
from changeover.teardown.footprint import Baseline, Target


class JournalObserver:
    """Writes what a teardown does into the journal of the run that asked for it."""

    def __init__(self, journal: Journal, phase: str) -> None:
        self._journal = journal
        self._phase = phase

    def stage(self, record: StageRecord) -> None:
        self._journal.append(EventName.CHANGEOVER_STAGE, phase=self._phase, **record.to_json())

    def intent(self, record: SignalRecord) -> None:
        self._journal.append(EventName.CHANGEOVER_SIGNAL, phase=self._phase, **record.to_json())

    def sample(self, sample: MachineSample) -> None:
        self._journal.note(EventName.CHANGEOVER_SAMPLE, phase=self._phase, **sample.to_json())


def change_over(
    context: RunContext, phase: str, targets: Sequence[Target], baseline: Baseline
) -> Clearance:
    """Clear the targets of a phase and write the clearance down; never raises for what it finds."""
    journal = context.journal
    journal.append(
        EventName.CHANGEOVER_STARTED, phase=phase, targets=[target.to_json() for target in targets]
    )
    clearance = clear(
        context.machine,
        targets,
        baseline,
        budgets=context.budgets,
        observer=JournalObserver(journal, phase),
    )
    journal.append(EventName.CHANGEOVER_CLEARED, phase=phase, clearance=clearance.to_json())
    return clearance
