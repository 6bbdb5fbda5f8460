"""A changeover of a run: teardown with every stage, signal and sample in the journal, the signal's line before it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from changeover.pipeline.journal import Event, EventName, Journal
from changeover.teardown.clear import MachineSample, clear
from changeover.teardown.clearance import Clearance, SignalRecord, StageRecord
from changeover.teardown.footprint import Baseline, Target

if TYPE_CHECKING:
    from changeover.pipeline.context import RunContext


class JournalObserver:
    """Writes what a teardown does into the journal of the run that asked for it."""

    def __init__(self, journal: Journal, phase: str) -> None:
        self._journal = journal
        self._phase = phase

    def stage(self, record: StageRecord) -> None:
        self._write(self._journal.append, EventName.CHANGEOVER_STAGE, record.to_json())

    def intent(self, record: SignalRecord) -> None:
        self._write(self._journal.append, EventName.CHANGEOVER_SIGNAL, record.to_json())

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


def change_over(context: RunContext, phase: str, targets: Sequence[Target], baseline: Baseline) -> Clearance:
    """Clear the targets of a phase and write the clearance down; never raises for what it finds."""
    observer = JournalObserver(context.journal, phase)
    observer.started(targets)
    clearance = clear(
        context.machine,
        targets,
        baseline,
        budgets=context.budgets,
        observer=observer,
    )
    # a clean machine that is not on record is cleared again by a resume; one that is not clean is told in any case
    write = context.journal.append if clearance.clean else context.journal.try_append
    write(EventName.CHANGEOVER_CLEARED, phase=phase, clearance=clearance.to_json())
    return clearance
