"""From what the journal says to what teardown must clear."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from changeover.machine.processes import ProcessIdentity
from changeover.machine.protocol import Machine
from changeover.machine.shm import Segment
from changeover.machine.sockets import SocketFile
from changeover.pipeline.folder import RunFolder
from changeover.pipeline.journal import read_events
from changeover.pipeline.state import PhaseState, StartedProcess, read_state
from changeover.teardown.drains import drain_for
from changeover.teardown.footprint import Baseline, StopPolicy, Target, take_baseline
from changeover.teardown.late_baseline import take_late_baseline


def targets_of_phase(folder: RunFolder, phase: PhaseState) -> list[Target]:
    """Jobs first, since they send to the server; a process whose start was never written down goes by its cookie."""
    ordered = sorted(phase.processes.values(), key=lambda process: process.kind == "server")
    return [_target(folder, phase.name, process) for process in ordered]


def baseline_of(phase: PhaseState, machine: Machine, targets: Sequence[Target]) -> Baseline:
    """What the machine must return to after a phase.

    That is as it was before the phase; after a reboot it is as it is now: nothing of the phase can be left, while what
    the system itself put into ``/dev/shm`` since would look like a leftover for ever.
    """
    if phase.baseline is None:
        return take_late_baseline(machine, targets)
    baseline = Baseline.from_json(phase.baseline)
    return baseline if baseline.boot_id == machine.boot_id else take_baseline(machine)


def targets_of_run(
    run_dir: Path, machine: Machine
) -> tuple[list[Target], Baseline, frozenset[ProcessIdentity]]:
    """What a run has started and not proven clear since, with the oldest baseline that it must return to, and who got
    SIGTERM from a teardown that did not come to its end.

    Raises FileNotFoundError where there is no journal, JournalDamaged where it cannot be trusted.
    """
    folder = RunFolder(run_dir.resolve())
    state = read_state(read_events(folder.journal))
    unclear = [phase for phase in state.phases.values() if phase.unclear]
    targets = [target for phase in unclear for target in targets_of_phase(folder, phase)]
    recorded = [phase for phase in unclear if phase.baseline is not None]
    baseline = (
        baseline_of(recorded[0], machine, targets) if recorded else take_late_baseline(machine, targets)
    )
    return targets, baseline, frozenset().union(*(phase.terminated for phase in unclear))


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
        drain=drain_for(process.engine, process.url),
        sockets=frozenset(SocketFile(**socket) for socket in process.sockets),
        derived_ports=process.derived_ports,
        cgroup=process.cgroup,
        stop=StopPolicy(process.stop or StopPolicy.GRACEFUL),
    )
