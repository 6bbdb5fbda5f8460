"""Starting the server of a phase and waiting, by progress, until it answers."""

from __future__ import annotations

import os
from typing import NoReturn

from changeover.engines.protocol import ServerCommand
from changeover.engines.readiness import GPU_TIMEOUT_S, wait_ready
from changeover.engines.registry import get_engine
from changeover.engines.versions import installed_version
from changeover.machine.page_cache import look
from changeover.machine.progress import Progress
from changeover.machine.shm import free_mib
from changeover.pipeline.commands import planned_launch, server_command, server_files
from changeover.pipeline.context import PhaseFailed, PortTaken, RunContext
from changeover.pipeline.follow import Throttle
from changeover.pipeline.gpu_room import expect_gpu_room
from changeover.pipeline.journal import EventName
from changeover.pipeline.processes import SERVER, PhaseProcesses
from changeover.pipeline.secrets import without_secrets
from changeover.pipeline.spec import ServerSpec
from changeover.teardown.footprint import StopPolicy
from changeover.teardown.launch import Owned

SHM_PER_RANK_MIB = 64
"""Docker's default for a whole container was too small for four ranks (nccl #290, #342: segments of 9.2 MiB each)."""
_LOOK_S = 0.2
_PROGRESS_PERIOD_S = 1.0


def start_server(
    context: RunContext, index: int, phase: str, spec: ServerSpec, processes: PhaseProcesses
) -> str:
    """The address of the server, which has generated a token; raises PhaseFailed where it does not come up."""
    journal, clock = context.journal, context.machine.clock
    folder = context.folder.server(index, phase)
    folder.mkdir(parents=True, exist_ok=True)
    command = server_command(context, index, spec)
    _expect_free_ports(context, phase, command)
    expect_gpu_room(
        get_engine(context.spec.engine.kind),
        planned_launch(context.spec, spec, context.model),
        context.model.weights_bytes,
        context.machine.gpus(GPU_TIMEOUT_S),
        {**os.environ, **command.env},
    )
    expect_shared_memory(context.spec.engine.tensor_parallel, command, free_mib())
    engine = get_engine(context.spec.engine.kind)
    weights = look(server_files(context, spec))
    stop = StopPolicy(spec.stop) if spec.stop is not None else engine.default_stop
    cgroup = processes.make_cgroup(SERVER)
    journal.append(
        EventName.SERVER_STARTING,
        phase=phase,
        engine=context.spec.engine.kind,
        version=installed_version(context.spec.engine.kind, command.argv[0]),
        profile=spec.profile,
        argv=list(command.argv),
        env=dict(command.env),
        ports=list(command.ports),
        url=command.url,
        cgroup=cgroup,
        stop=stop.value,
        weights_bytes=weights.bytes,
        cached_bytes=weights.cached_bytes,
    )
    started_s = clock.monotonic()
    owned = processes.start(
        SERVER,
        argv=list(command.argv),
        env=command.env,
        folder=folder,
        ports=tuple(command.ports),
        drain=engine.drain(command),
        cgroup=cgroup,
        stop=stop,
    )
    journal.append(
        EventName.SERVER_STARTED,
        phase=phase,
        leader=owned.identity.to_json(),
        pid=owned.pid,
        start_ticks=owned.identity.start_ticks,
        sid=owned.sid,
        url=command.url,
        log=str(owned.log.relative_to(context.folder.path)),
    )
    _wait_until_ready(context, phase, spec, owned, command, processes)
    processes.look_for_members()
    journal.append(
        EventName.SERVER_READY,
        phase=phase,
        seconds=clock.monotonic() - started_s,
        url=command.url,
        exposed=processes.exposed_ports(SERVER),
    )
    return command.url


def _expect_free_ports(context: RunContext, phase: str, command: ServerCommand) -> None:
    """A stranger on our server's port would answer for it, be called ready, and be measured in its place."""
    for port in command.ports:
        if context.machine.port(port).reason == "EADDRINUSE":
            raise PortTaken(
                expected=f"port {port} free for the server of phase {phase}",
                seen="somebody listens there already",
                todo="End whoever does (`changeover check` names ports and their holders), or give the server another "
                "`port:`.",
            )


def expect_shared_memory(ranks: int, command: ServerCommand, free: float) -> None:
    """Ranks talk through ``/dev/shm``; where it is too small, or full of what others left, they fail after the load.

    ``free`` in MiB. Raises PhaseFailed before anything is started; ``NCCL_SHM_DISABLE=1`` in ``env:`` goes without.
    """
    needed = ranks * SHM_PER_RANK_MIB
    if ranks > 1 and free < needed and command.env.get("NCCL_SHM_DISABLE") != "1":
        raise PhaseFailed(
            expected=f"{needed} MiB free in /dev/shm for {ranks} ranks",
            seen=f"{free:.0f} MiB",
            todo="Remove what was left there (`ls -l /dev/shm`), give the container more (--shm-size=1g, "
            "--ipc=host), or set NCCL_SHM_DISABLE: '1' in env.",
        )


def hold_server(context: RunContext, phase: str, processes: PhaseProcesses) -> NoReturn:
    """Until somebody stops the run (raises Interrupted) or the server ends (raises PhaseFailed)."""
    while True:
        context.check()
        processes.note_members()
        processes.expect_server("it is held")
        context.machine.clock.sleep(_LOOK_S)


def _wait_until_ready(
    context: RunContext,
    phase: str,
    spec: ServerSpec,
    owned: Owned,
    command: ServerCommand,
    processes: PhaseProcesses,
) -> None:
    due = Throttle(context.machine.clock.monotonic, _PROGRESS_PERIOD_S)

    def watch(progress: Progress) -> None:
        context.check()
        processes.note_members()
        if due.allows(progress.stage):
            context.journal.note(EventName.SERVER_LOADING, phase=phase, progress=progress.to_json())

    result = wait_ready(
        context.machine,
        owned,
        get_engine(context.spec.engine.kind),
        command,
        checkpoint_bytes=context.model.weights_bytes,
        stall_s=spec.stall_s,
        on_progress=watch,
    )
    if not result.ready:
        todo = f"Its log: {owned.log}"
        if result.stacks:
            stacks = owned.log.with_name("stacks.txt")
            stacks.write_text(without_secrets(result.stacks))  # each begins with its command line
            todo += f"; what its processes were doing: {stacks}"
        raise PhaseFailed(
            expected=f"the server of phase {phase} to become ready",
            seen=without_secrets(result.reason),  # it repeats a line of the log
            todo=todo,
        )
