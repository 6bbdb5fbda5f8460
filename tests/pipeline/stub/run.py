"""A run with a stub engine, killed by SIGKILL right after its n-th event: ``python -m tests.pipeline.stub.run``.

Everything is real but the model: the processes, the sockets, the journal, the teardown.
"""

import errno
import os
import signal
import sys
from pathlib import Path

from changeover.engines import protocol
from changeover.engines.models import ModelFacts
from changeover.engines.protocol import (
    LaunchSpec,
    LoadReading,
    ServerCommand,
    SpeculationMetrics,
)
from changeover.machine.local import LocalMachine
from changeover.pipeline import commands, runner, serving
from changeover.pipeline.folder import RunFolder
from changeover.pipeline.journal import Journal
from changeover.pipeline.load import check_pipeline
from changeover.teardown.footprint import Drain, StopPolicy

MODEL = ModelFacts("stub", "/nowhere", "Stub", 4, 8, 16, 64, 1000, "0" * 64)


class IdleDrain:
    """Of a server that never has anything to do."""

    name = "nothing to drain"

    def begin(self) -> None:
        pass

    def running(self) -> int | None:
        return 0

    def proves_idle(self) -> bool:
        return False

    def cut(self) -> None:
        pass


class StubEngine:
    kind = "stub"
    server_module = None
    default_stop = StopPolicy.GRACEFUL
    speculation = SpeculationMetrics(None, None, None)

    def refusals(self, launch: LaunchSpec) -> list[str]:
        return []

    def server_command(self, launch: LaunchSpec) -> ServerCommand:
        argv = (sys.executable, "-S", str(Path(__file__).with_name("server.py")), str(launch.port))
        return ServerCommand(argv, {}, (launch.port,), f"http://127.0.0.1:{launch.port}")

    def claimed_share(self, launch: LaunchSpec) -> float | None:
        return None

    def is_ready(self, url: str) -> bool:
        return protocol.is_healthy(url)

    def load(self, url: str) -> LoadReading | None:
        return LoadReading(0, 0)

    def drain(self, command: ServerCommand) -> Drain:
        return IdleDrain()


def spec(folder: Path, work: str) -> dict:
    """Two phases: a server with a job against it, and a job alone. ``work`` is a Python program."""
    job = {"kind": "command", "argv": [sys.executable, "-S", "-c", work]}
    return {
        "name": "stub",
        "model": {"path": "/nowhere"},
        "prompts": str(folder / "prompts.txt"),
        "phases": [
            {
                "name": "one",
                "server": {"profile": "production"},
                "jobs": [{**job, "name": "a"}, {**job, "name": "b"}],
            },
            {"name": "two", "jobs": [{**job, "name": "c"}]},
        ],
    }


def kill_after(events: int) -> None:
    """Die by SIGKILL as soon as so many events are on the disk (0: never)."""
    for method in ("append", "note"):
        original = getattr(Journal, method)

        def wrapped(self, name, /, *, _original=original, **data):
            event = _original(self, name, **data)
            if events and event.seq + 1 >= events:
                os.kill(os.getpid(), signal.SIGKILL)
            return event

        setattr(Journal, method, wrapped)


def fill_disk_at(name_of_event: str) -> None:
    """From the first event of that name on, nothing can be written to the journal any more."""
    original = Journal._write
    full = []

    def wrapped(self, name, data):
        if name == name_of_event or full:
            full.append(name)
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, name, data)

    Journal._write = wrapped


def main(path: Path, mode: str, events: int, work: str) -> int:
    engine = StubEngine()
    for room in (commands, serving):
        room.get_engine = lambda kind: engine
    kill_after(events)
    if mode == "full":
        fill_disk_at("job.started")
    folder = RunFolder(path)
    machine = LocalMachine(adopt_orphans=True)
    if mode == "resume":
        return runner.resume_run(folder, lambda spec: MODEL, machine, print)
    return runner.start_run(folder, check_pipeline(spec(path, work), source="test"), MODEL, machine, print)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]))
