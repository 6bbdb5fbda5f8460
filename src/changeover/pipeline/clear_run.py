"""Clear what a run left behind, from its journal alone, and write the clearance into that journal."""

from __future__ import annotations

from pathlib import Path

from changeover.machine.errors import InvalidInput
from changeover.machine.processes import ProcessIdentity
from changeover.machine.protocol import Machine
from changeover.pipeline.changeover import JournalObserver
from changeover.pipeline.folder import RunFolder
from changeover.pipeline.journal import EventName, Journal
from changeover.pipeline.targets import targets_of_run
from changeover.teardown.budgets import Budgets
from changeover.teardown.claim import claim
from changeover.teardown.clear import SilentObserver, clear
from changeover.teardown.clearance import Clearance
from changeover.teardown.footprint import Baseline, Target
from changeover.teardown.inventory import Inventory, take_inventory


def inventory_of_run(run_dir: Path, machine: Machine) -> Inventory:
    """Who of that run is on the machine, with the proof for each; sends nothing."""
    targets, _, _ = _targets(run_dir, machine)
    return take_inventory(machine, targets)


def clear_run(run_dir: Path, machine: Machine, budgets: Budgets) -> Clearance:
    """Stop what the run started and prove it gone; raises RunBusy while its runner lives."""
    _targets(run_dir, machine)  # refuses what is no run before a lock is made in it
    with RunFolder(run_dir.resolve()).locked(), claim(f"clear of run {run_dir.name}"):
        targets, baseline, terminated = _targets(run_dir, machine)
        phases = list(dict.fromkeys(target.name.split("/", 1)[0] for target in targets))
        if not phases:
            return clear(machine, (), baseline, budgets=budgets, observer=SilentObserver())
        journal = Journal(run_dir.resolve() / "journal.jsonl", machine.clock)
        try:
            observer = JournalObserver(journal, phases[-1])
            observer.started(targets)
            clearance = clear(
                machine, targets, baseline, budgets=budgets, observer=observer, terminated=terminated
            )
            for phase in phases:
                journal.try_append(EventName.CHANGEOVER_CLEARED, phase=phase, clearance=clearance.to_json())
        finally:
            journal.close()
        return clearance


def _targets(run_dir: Path, machine: Machine) -> tuple[list[Target], Baseline, frozenset[ProcessIdentity]]:
    try:
        return targets_of_run(run_dir, machine)
    except FileNotFoundError as error:
        raise InvalidInput(
            expected=f"a run's folder with its journal at {run_dir}",
            seen=str(error),
            todo="Give the run's id as `changeover status` shows it, and --runs-dir where the runs are.",
        ) from error
