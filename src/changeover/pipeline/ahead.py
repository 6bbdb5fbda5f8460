"""While a phase runs, what the next one needs is looked at, and what its server will read is read.

Only beside jobs that measure nothing (`collect`, `train`): a benchmark has the machine to itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from changeover.engines.models import weight_files
from changeover.engines.registry import get_engine
from changeover.machine.durable import replace_json
from changeover.machine.errors import ChangeoverError
from changeover.machine.shm import free_mib
from changeover.pipeline.commands import planned_launch, server_files
from changeover.pipeline.context import RunContext
from changeover.pipeline.estimates import disk_refusal
from changeover.pipeline.journal import EventName
from changeover.pipeline.plan import free_disk_bytes, plan_job
from changeover.pipeline.processes import AHEAD, PhaseProcesses
from changeover.pipeline.serving import expect_shared_memory
from changeover.pipeline.spec import CollectJob, JobSpec, PhaseSpec, ServerSpec, is_path

QUIET_JOBS = ("collect", "train")


def next_phase(context: RunContext, index: int) -> PhaseSpec | None:
    """The phase after this one, where there is one."""
    phases = context.spec.phases
    return phases[index + 1] if index + 1 < len(phases) else None


def next_server(context: RunContext, index: int) -> ServerSpec | None:
    """The server that will be started next, in whichever later phase."""
    later = (phase.server for phase in context.spec.phases[index + 1 :])
    return next((server for server in later if server is not None), None)


def problems_ahead(context: RunContext, index: int, processes: PhaseProcesses) -> list[str]:
    """What would stop the next phase if it began now, found while there is time to mend it; empty where nothing."""
    phase = next_phase(context, index)
    if phase is None:
        return []
    found = [short for job in phase.jobs if (short := _disk_problem(context, phase, job)) is not None]
    if phase.server is None:
        return found
    launch = planned_launch(context.spec, phase.server, context.model)
    command = get_engine(context.spec.engine.kind).server_command(launch)
    taken = [port for port in command.ports if context.machine.port(port).reason == "EADDRINUSE"]
    found += [f"port {port} is taken by somebody else" for port in taken if port not in processes.ports()]
    try:
        expect_shared_memory(context.spec.engine.tensor_parallel, command, free_mib())
    except ChangeoverError as error:
        found.append(f"expected {error.expected}; saw {error.seen}")
    if not weight_files(context.model.path):
        found.append(f"no weights at {context.model.path} any more")
    drafter = phase.server.drafter
    if drafter is not None and is_path(drafter) and not Path(drafter).expanduser().is_dir():
        found.append(f"no drafter at {drafter}")
    return found


@contextmanager
def working_ahead(
    context: RunContext, index: int, phase: str, job: JobSpec, processes: PhaseProcesses
) -> Iterator[None]:
    """Beside one job: the checks of the next phase, and the reading for the next server, ended with the job."""
    server = next_server(context, index)
    if job.kind not in QUIET_JOBS or next_phase(context, index) is None:
        yield
        return
    problems = problems_ahead(context, index, processes)
    following = context.spec.phases[index + 1].name
    context.journal.append(EventName.AHEAD_CHECKED, phase=phase, next=following, problems=problems)
    if server is None:
        yield
        return
    folder = context.folder.phase(index, phase) / AHEAD
    _start(context, index, server, folder, processes)
    yield
    processes.end(AHEAD)
    try:
        done = json.loads((folder / "ahead.json").read_text())
    except (OSError, ValueError):
        done = {}  # the job was over before it had read anything
    context.journal.append(EventName.AHEAD_DONE, phase=phase, **done)


def _start(
    context: RunContext, index: int, server: ServerSpec, folder: Path, processes: PhaseProcesses
) -> None:
    phase = context.spec.phases[index].name
    engine = get_engine(context.spec.engine.kind)
    launch = planned_launch(context.spec, server, context.model)
    runs_now = processes.server is not None  # the same engine: its libraries are in use, and so in memory
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ahead.json").unlink(missing_ok=True)
    request = {
        "files": list(map(str, server_files(context, server))),
        "python": launch.python,
        "module": None if runs_now else engine.server_module,
        "env": dict(engine.server_command(launch).env),
    }
    replace_json(folder / "request.json", request)
    cgroup = processes.make_cgroup(AHEAD)
    context.journal.append(EventName.AHEAD_STARTING, phase=phase, cgroup=cgroup, files=request["files"])
    owned = processes.start(
        AHEAD,
        argv=[sys.executable, "-m", "changeover.pipeline.ahead_reader", str(folder)],
        env={},
        folder=folder,
        cgroup=cgroup,
    )
    context.journal.append(EventName.AHEAD_STARTED, phase=phase, leader=owned.identity.to_json())


def _disk_problem(context: RunContext, phase: PhaseSpec, job: JobSpec) -> str | None:
    if not isinstance(job, CollectJob):
        return None
    needed = plan_job(context.spec, phase, job, context.model).bytes
    where = context.folder.path
    return disk_refusal(needed, int(job.disk_reserve_gib * 2**30), free_disk_bytes(where), str(where))
