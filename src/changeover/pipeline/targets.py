"""From what the journal says to what teardown must clear."""

from __future__ import annotations

from pathlib import Path

from changeover.machine.shm import Segment
from changeover.pipeline.folder import RunFolder
from changeover.pipeline.journal import read_events
from changeover.pipeline.state import PhaseState, StartedProcess, read_state
from changeover.teardown.footprint import Baseline, Target


def targets_of_phase(folder: RunFolder, phase: PhaseState) -> list[Target]:
    """Jobs first, since they send to the server; a process whose start was never written down goes by its cookie."""
    ordered = sorted(phase.processes.values(), key=lambda process: process.kind == "server")
    return [_target(folder, phase.name, process) for process in ordered]


def targets_of_run(run_dir: Path) -> tuple[list[Target], Baseline | None]:
    """What a run has started and not proven clear since, with the oldest baseline that it must return to.

    Raises FileNotFoundError where there is no journal, JournalDamaged where it cannot be trusted.
    """
    folder = RunFolder(run_dir.resolve())
    state = read_state(read_events(folder.journal))
    unclear = [phase for phase in state.phases.values() if phase.unclear]
    targets = [target for phase in unclear for target in targets_of_phase(folder, phase)]
    baselines = [phase.baseline for phase in unclear if phase.baseline is not None]
    return targets, Baseline.from_json(baselines[0]) if baselines else None


def _target(folder: RunFolder, phase: str, process: StartedProcess) -> Target:
    leader = process.leader
    return Target(
        name=f"{phase}/{process.name}",
        cookie=folder.cookie(phase, process.name),
        leader=leader,
        sid=None if leader is None else leader.pid,
        members=frozenset(process.members | ({leader} if leader is not None else set())),
        segments=frozenset(Segment(**segment) for segment in process.segments),
        ports=process.ports,
        files=process.files,
    )
