"""What is done for the next phase while one runs: real processes and files, a stub for the engine alone."""

import dataclasses
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from changeover.engines.models import ModelFacts
from changeover.machine.local import LocalMachine
from changeover.machine.page_cache import look
from changeover.pipeline import ahead
from changeover.pipeline.ahead import problems_ahead, working_ahead
from changeover.pipeline.context import RunContext
from changeover.pipeline.folder import RunFolder
from changeover.pipeline.journal import Journal
from changeover.pipeline.load import check_pipeline
from changeover.pipeline.processes import AHEAD, PhaseProcesses
from changeover.pipeline.state import read_state
from tests.machine.test_page_cache import put_out
from tests.pipeline.stub.run import StubEngine

TRAIN = {"kind": "train", "states": "/nowhere"}


class ImportedEngine(StubEngine):
    """Its server is one module, which leaves word of how it was imported."""

    server_module = "the_server"

    def server_command(self, launch):
        return dataclasses.replace(super().server_command(launch), env=launch.env)


class Run:
    """A run in its first phase (a training), with a server in its second."""

    def __init__(self, folder: Path, model: Path, monkeypatch, **second):
        engine = ImportedEngine()
        monkeypatch.setattr(ahead, "get_engine", lambda kind: engine)
        server = {"profile": "production", **second.pop("server", {})}
        jobs = second.pop("jobs", [{"kind": "hold"}])
        document = {
            "name": "ahead",
            "model": {"path": str(model)},
            "prompts": str(folder / "prompts.txt"),
            "engine": {"env": {"PYTHONPATH": str(folder / "engine")}},
            "phases": [
                {"name": "one", "jobs": [TRAIN]},
                {"name": "two", "server": server, "jobs": jobs},
            ],
        }
        self.machine = LocalMachine()
        facts = ModelFacts("tiny", str(model), "Stub", 8, 8, 16, 64, 1000, "0" * 64)
        path = folder / "run"
        path.mkdir()
        run = RunFolder(path)
        run.secret()
        self.journal = Journal(run.journal, self.machine.clock)
        spec = check_pipeline(document, source="test")
        self.context = RunContext(run, spec, facts, self.machine, self.journal, lambda: None)
        self.processes = PhaseProcesses(self.context, "one")
        self.job = spec.phases[0].jobs[0]
        self.journal.append("phase.started", phase="one", index=0, digest="")

    def event(self, name):
        return next(event.data for event in reversed(self.journal.events) if event.event == name)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(30 * 2**20))
    put_out(weights)
    (tmp_path / "engine").mkdir()
    told = "import os, pathlib\npathlib.Path(__file__).with_name('told').write_text(repr(dict(os.environ)))\n"
    (tmp_path / "engine" / "the_server.py").write_text(told)
    return folder


def wait_for(machine, what, limit_s=60.0):
    end = machine.clock.monotonic() + limit_s
    while not (found := what()):
        assert machine.clock.monotonic() < end, "not seen in time"
        machine.clock.sleep(0.05)
    return found


def test_the_next_servers_weights_and_libraries_are_read_beside_a_training(tmp_path, model, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    run = Run(tmp_path, model, monkeypatch)
    done = run.context.folder.phase(0, "one") / AHEAD / "ahead.json"

    def imported():
        return done.exists() and json.loads(done.read_text())["imported"] is not None

    with working_ahead(run.context, 0, "one", run.job, run.processes):
        leader = read_state(run.journal.events).phases["one"].processes[AHEAD].leader
        assert run.machine.process(leader.pid) is not None
        wait_for(run.machine, imported)
        assert Path(f"/proc/{leader.pid}/stat").read_text().rpartition(")")[2].split()[16] == "19"  # its nice
    assert run.machine.exit_code(leader) == 0
    said = run.event("ahead.done")
    weights = (model / "model.safetensors").stat().st_size
    assert said["imported"] is True and said["bytes"] == said["cached_bytes"] == weights
    assert look([model / "model.safetensors"]).cached_bytes == weights
    environment = (tmp_path / "engine" / "told").read_text()
    assert "'CUDA_VISIBLE_DEVICES': ''" in environment and str(tmp_path / "engine") in environment
    assert list((tmp_path / "engine" / "__pycache__").glob("the_server.*.pyc"))


def test_what_it_imports_ends_with_it(tmp_path, model, monkeypatch):
    (tmp_path / "engine" / "the_server.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path(__file__).with_name('pid').write_text(str(os.getpid()))\n"
        "time.sleep(600)"
    )
    run = Run(tmp_path, model, monkeypatch)
    pid = tmp_path / "engine" / "pid"
    with working_ahead(run.context, 0, "one", run.job, run.processes):
        wait_for(run.machine, lambda: pid.exists() and pid.read_text())
    assert run.machine.process(int(pid.read_text())) is None
    assert run.event("ahead.done")["imported"] is None


def test_a_server_that_cannot_be_imported_is_no_failure_of_this_phase(tmp_path, model, monkeypatch):
    (tmp_path / "engine" / "the_server.py").write_text("raise SystemExit(3)")
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    run = Run(tmp_path, model, monkeypatch)
    done = run.context.folder.phase(0, "one") / AHEAD / "ahead.json"
    with working_ahead(run.context, 0, "one", run.job, run.processes):
        wait_for(run.machine, lambda: done.exists() and json.loads(done.read_text())["imported"] is not None)
    assert run.event("ahead.done")["imported"] is False


def test_nothing_is_read_beside_a_benchmark_or_in_the_last_phase(tmp_path, model, monkeypatch):
    bench = [{"kind": "bench"}]
    run = Run(tmp_path, model, monkeypatch, jobs=bench)
    for index, job in ((0, run.context.spec.phases[1].jobs[0]), (1, run.job)):
        with working_ahead(run.context, index, "one", job, run.processes):
            pass
    assert [event.event for event in run.journal.events] == ["phase.started"]


def test_what_would_stop_the_next_phase_is_said_now(tmp_path, model, monkeypatch):
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    collect = {"kind": "collect", "expected_tokens": 10**15}
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        run = Run(tmp_path, model, monkeypatch, server={"profile": "capture", "port": port}, jobs=[collect])
        found = problems_ahead(run.context, 0, run.processes)
        assert [one.partition(":")[0] for one in found] == ["disk", f"port {port} is taken by somebody else"]
    os.unlink(model / "model.safetensors")
    assert problems_ahead(run.context, 0, run.processes)[1:] == [f"no weights at {model} any more"]


def test_a_port_of_ours_is_no_problem(tmp_path, model, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as ours:
        port = ours.getsockname()[1]
        run = Run(tmp_path, model, monkeypatch, server={"port": port})
        run.processes.start(
            "server", argv=[sys.executable, "-c", ""], env={}, folder=tmp_path, ports=(port,), files=()
        )
        assert problems_ahead(run.context, 0, run.processes) == []
        assert problems_ahead(run.context, 1, run.processes) == []
