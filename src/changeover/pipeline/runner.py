"""Doing a run from its first phase or from where it stopped; every end of it is in the journal."""

from __future__ import annotations

import os
import platform
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from changeover import __version__
from changeover.engines.models import ModelFacts
from changeover.machine.durable import replace_json
from changeover.machine.errors import ChangeoverError, InvalidInput
from changeover.machine.protocol import Machine
from changeover.pipeline.changeover import change_over
from changeover.pipeline.context import MachineNotClear, RunContext
from changeover.pipeline.folder import RunFolder
from changeover.pipeline.follow import Interrupted, Interrupts
from changeover.pipeline.journal import Event, EventName, Journal
from changeover.pipeline.load import check_pipeline
from changeover.pipeline.phase import is_phase_done, run_phase
from changeover.pipeline.spec import PipelineSpec
from changeover.pipeline.state import read_state
from changeover.pipeline.targets import baseline_of, targets_of_phase
from changeover.report.page import render_page
from changeover.teardown.claim import claim

INTERRUPTED_EXIT = 130
_PACKAGES = ("torch", "transformers", "numpy", "safetensors", "aiohttp", "nvidia-ml-py")


def start_run(
    folder: RunFolder,
    spec: PipelineSpec,
    model: ModelFacts,
    machine: Machine,
    listen: Callable[[Event], None],
) -> int:
    """A new run in an empty folder; returns its exit code. The machine is cleared whatever happens."""
    folder.secret()
    with folder.locked(), claim(f"run {folder.run_id}"):
        journal = Journal(folder.journal, machine.clock)
        journal.listen(listen)
        description = {
            "run_id": folder.run_id,
            "name": spec.name,
            "spec": spec.model_dump(mode="json"),
            "argv": sys.argv,
            "versions": versions(),
            "host": platform.node(),
            "boot_id": machine.boot_id,
            "pid": os.getpid(),
            "model": model.to_json(),
        }
        replace_json(folder.description, description)
        journal.append(EventName.RUN_STARTED, **description)
        return _go(folder, spec, lambda: model, machine, journal)


def resume_run(
    folder: RunFolder,
    model_of: Callable[[PipelineSpec], ModelFacts],
    machine: Machine,
    listen: Callable[[Event], None],
) -> int:
    """Go on with a run: first clear what it left, then do the phases that are not done. Returns the exit code.

    The pipeline is the one that the run was started with: it stands in the journal.
    """
    with folder.locked(), claim(f"run {folder.run_id}"):
        journal = Journal(folder.journal, machine.clock)
        if not journal.events:
            raise InvalidInput(
                expected=f"a journal with at least its first event in {folder.path}",
                seen="none: the run was killed before it began",
                todo="Start it again without --resume.",
            )
        journal.listen(listen)
        spec = check_pipeline(read_state(journal.events).spec, source=str(folder.journal))
        journal.append(
            EventName.RUN_RESUMED, pid=os.getpid(), boot_id=machine.boot_id, after_seq=len(journal.events) - 1
        )
        return _go(folder, spec, lambda: model_of(spec), machine, journal)


def _go(
    folder: RunFolder,
    spec: PipelineSpec,
    model_of: Callable[[], ModelFacts],
    machine: Machine,
    journal: Journal,
) -> int:
    """Clear first: a model that is missing, or takes minutes to hash or convert, must not keep old processes alive."""
    end = _End(folder, machine, journal, machine.clock.monotonic())
    with Interrupts() as interrupts:
        try:
            _clear_what_is_left(folder, spec, machine, journal)
            interrupts.check()
            context = RunContext(folder, spec, model_of(), machine, journal, interrupts.check)
            for index, phase in enumerate(spec.phases):
                interrupts.check()
                if not is_phase_done(context, phase, index):
                    run_phase(context, phase, index)
        except Interrupted as error:
            reason = f"{error}; the machine is cleared"
            return end(EventName.RUN_INTERRUPTED, reason, INTERRUPTED_EXIT)
        except ChangeoverError as error:
            return end(EventName.RUN_FAILED, str(error), error.exit_code)
        except Exception as error:  # noqa: BLE001 - a full disk, a defect: an end like any other, the traceback beside it
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
            return end(EventName.RUN_FAILED, reason, ChangeoverError.exit_code)
        return end(EventName.RUN_DONE, "", 0)


@dataclass(frozen=True)
class _End:
    """Writes the end of a run, and its page; called once."""

    folder: RunFolder
    machine: Machine
    journal: Journal
    started_s: float

    def __call__(self, name: EventName, reason: str, exit_code: int) -> int:
        seconds = self.machine.clock.monotonic() - self.started_s
        self.journal.try_append(name, seconds=seconds, reason=reason, exit_code=exit_code)
        self.journal.close()
        try:
            write_report(self.folder, self.journal.events)
        except Exception as error:  # noqa: BLE001 - the run has ended as it has; its page can be made again
            print(f"no report: {type(error).__name__}: {error}; try `changeover report`", file=sys.stderr)
        return exit_code


def _clear_what_is_left(folder: RunFolder, spec: PipelineSpec, machine: Machine, journal: Journal) -> None:
    """Before anything starts: what an earlier Changeover of this run started and never proved gone."""
    for phase in read_state(journal.events).phases.values():
        if not phase.unclear:
            continue
        targets = targets_of_phase(folder, phase)
        baseline = baseline_of(phase, machine, targets)
        clearance = change_over(
            journal, machine, spec.teardown, phase.name, targets, baseline, frozenset(phase.terminated)
        )
        if not clearance.clean:
            raise MachineNotClear(phase.name, clearance)


def write_report(folder: RunFolder, events: list[Event]) -> Path:
    """The page of a run, complete or absent."""
    temporary = folder.report.with_name(f".report.{os.getpid()}.html")
    temporary.write_text(render_page(events), encoding="utf-8")
    temporary.rename(folder.report)
    return folder.report


def versions() -> dict[str, str]:
    """What the figures of a run depend on, as installed beside Changeover."""
    found = {"changeover": __version__, "python": platform.python_version(), "kernel": platform.release()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
