"""Waiting by progress: hours of slow loading are fine, silence is not, death is noticed at once."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from changeover.engines import readiness
from changeover.engines.protocol import LaunchSpec, ServerCommand, generate_one_token
from changeover.engines.readiness import Outcome, Pulse, error_line, loading_progress, moved, wait_ready
from changeover.engines.registry import get_engine
from changeover.machine import http
from changeover.machine.gpus import NO_GPU, GpuFacts, GpuProcess, GpuReading, Presence
from changeover.machine.local import LocalMachine
from changeover.machine.processes import TICKS_PER_S, ProcessFacts, ProcessIdentity
from changeover.machine.progress import Progress
from changeover.teardown.launch import Owned, launch

PID = 400_000_000  # no kernel gives such a pid out
IDENTITY = ProcessIdentity(PID, 1, "boot")
COMMAND = ServerCommand(argv=("server",), env={}, ports=(1,), url="http://127.0.0.1:1")


@dataclass
class Script:
    """A server by the clock: it works (CPU, log) until ``works_s``, is ready at ``ready_s``, dies at ``dies_s``."""

    log: Path
    works_s: float = 1e9
    ready_s: float = 1e9
    dies_s: float = 1e9
    writes_log: bool = True
    cpu_share: float = 0.5
    now_s: float = 0.0
    looks: int = 0
    problem: str | None = None
    gpu_mib_by_s: tuple[tuple[float, float], ...] = ()
    gpu_questions: int = 0
    progress: list[Progress] = field(default_factory=list)

    # the clock
    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.looks += 1
        assert self.looks < 100_000, "the wait does not end"
        if self.writes_log and self.now_s < self.works_s:
            with self.log.open("a") as log:
                log.write("loading shard\n")

    @property
    def clock(self) -> Script:
        return self

    # the machine
    def process(self, pid: int) -> ProcessFacts | None:
        if self.now_s >= self.dies_s:
            return None
        ticks = int(min(self.now_s, self.works_s) * self.cpu_share * TICKS_PER_S)
        return ProcessFacts(IDENTITY, 1, PID, PID, "S", "server", 0, 0, ticks, 10.0, 1)

    def processes(self) -> dict[int, ProcessFacts]:
        facts = self.process(PID)
        return {} if facts is None else {PID: facts}

    def exit_code(self, identity: ProcessIdentity) -> int | None:
        return -9 if self.now_s >= self.dies_s else None

    def gpus(self, timeout_s: float) -> GpuReading:
        self.gpu_questions += 1
        used = [mib for since_s, mib in self.gpu_mib_by_s if self.now_s >= since_s]
        if not used:
            return NO_GPU
        ours, strangers = GpuProcess(PID, used[-1], "compute"), GpuProcess(7, self.now_s, "compute")
        gpu = GpuFacts("GPU-0", 0, "H200", 143_771.0, 0.0, 0.0, "v2", True, (ours, strangers))
        return GpuReading(Presence.READ, (gpu,))

    # the engine
    def is_ready(self, url: str) -> bool:
        return self.ready_s <= self.now_s < self.dies_s

    def wait(self, stall_s: float = 60.0) -> readiness.Readiness:
        machine: Any = self
        owned = Owned(machine=machine, identity=IDENTITY, log=self.log, cookie="")
        return wait_ready(
            machine,
            owned,
            machine,
            COMMAND,
            checkpoint_bytes=1000,
            stall_s=stall_s,
            on_progress=self.progress.append,
        )


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    made = Script(tmp_path / "log")

    def first_token(_url: str, *, timeout_s: float) -> None:
        if made.problem is not None:
            raise http.HttpError(made.problem)

    monkeypatch.setattr(readiness, "generate_one_token", first_token)
    return made


def test_vllm_35547_half_an_hour_of_loading_is_waited_for(script: Script) -> None:
    script.ready_s = 1800.0
    result = script.wait()
    assert result.ready and result.seconds == 1800.0
    assert len(script.progress) == 3600


def test_a_server_that_only_computes_is_not_stalled(script: Script) -> None:
    script.writes_log, script.ready_s = False, 300.0
    assert script.wait().ready


def test_a_server_that_stops_moving_is_stalled_after_the_limit_and_no_sooner(script: Script) -> None:
    script.works_s = 100.0
    result = script.wait(stall_s=60.0)
    assert result.outcome is Outcome.STALLED
    assert 159.0 <= result.seconds <= 161.0
    assert "nothing moved for 60 s" in result.reason and "loading shard" in result.reason


def test_gpu_memory_of_ours_is_progress_and_that_of_a_stranger_is_not(script: Script) -> None:
    script.works_s, script.gpu_mib_by_s = 100.0, ((0.0, 500.0), (145.0, 900.0))
    result = script.wait(stall_s=60.0)
    assert result.outcome is Outcome.STALLED
    assert 219.0 <= result.seconds <= 222.0, "the silence after the last move at 160 s is as long as asked"
    assert script.gpu_questions == 4, "a driver is entered twice in a silence"


def test_idle_polling_is_no_progress(script: Script) -> None:
    script.writes_log, script.cpu_share = False, 0.005
    assert script.wait().outcome is Outcome.STALLED


def test_a_dead_server_is_noticed_within_a_second_with_its_reason(script: Script) -> None:
    script.log.write_text("starting\nRuntimeError: CUDA out of memory. Tried to allocate 2 GiB\nbye\n")
    script.writes_log, script.dies_s = False, 42.2
    result = script.wait()
    assert result.outcome is Outcome.DIED and result.seconds < 43.2
    assert "status -9" in result.reason and "CUDA out of memory" in result.reason


def test_a_server_that_says_ready_and_generates_nothing_is_not_ready(script: Script) -> None:
    script.ready_s, script.problem = 5.0, "http://x answered 500"
    result = script.wait()
    assert not result.ready and "generated no token" in result.reason and "500" in result.reason


def test_the_watcher_can_end_the_wait(script: Script) -> None:
    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    machine: Any = script
    owned = Owned(machine=machine, identity=IDENTITY, log=script.log, cookie="")
    with pytest.raises(KeyboardInterrupt):
        wait_ready(machine, owned, machine, COMMAND, checkpoint_bytes=1, stall_s=1.0, on_progress=interrupt)


def test_progress_has_rate_and_time_left() -> None:
    progress = loading_progress(Pulse(0, 0, 0, 0), Pulse(4.0, 400, 2.0, 9), 1000)
    assert (progress.done, progress.total, progress.unit) == (400, 1000, "bytes")
    assert progress.detail["bytes_per_s"] == 100 and progress.detail["eta_s"] == 6.0


def test_progress_at_the_first_look_divides_by_nothing() -> None:
    start = Pulse(5.0, 0, 0, 0)
    assert loading_progress(start, start, 1000).detail["eta_s"] is None


def test_each_sign_of_life_counts() -> None:
    still = Pulse(0.0, 5, 1.0, 7)
    assert not moved(still, Pulse(10.0, 5, 1.0, 7))
    assert moved(still, Pulse(10.0, 6, 1.0, 7))
    assert moved(still, Pulse(10.0, 5, 1.5, 7))
    assert moved(still, Pulse(10.0, 5, 1.0, 8))


def test_the_error_line_is_the_last_that_speaks_of_one() -> None:
    assert error_line("ValueError: a\nOSError: b\nclosing\n") == "OSError: b"
    assert error_line("one\ntwo\n\n") == "two"
    sglang = "ImportError: cannot import name 'x'\n[13:25:10] SIGQUIT received. It usually means one child failed.\n"
    assert error_line(sglang) == "ImportError: cannot import name 'x'"
    vllm = "(EngineCore pid=7) ERROR 12-01 core.py:9] ValueError: no memory left\nRuntime failed, see above\n"
    assert error_line(vllm).endswith("ValueError: no memory left")
    assert error_line("") == "(the log is empty)"


def start(tmp_path: Path, argv: list[str]) -> tuple[LocalMachine, Owned]:
    machine = LocalMachine()
    return machine, launch(machine, argv=argv, env={}, cwd=tmp_path, log=tmp_path / "log", cookie="test")


def test_the_real_embedded_server_becomes_ready(tiny_model_dir: Path, tmp_path: Path) -> None:
    """And says how it loads, how busy it is, and drains: the whole door that the runner uses."""
    from tests.engine_fixtures import free_port

    engine = get_engine("embedded")
    launched = LaunchSpec(
        profile="production", model_path=tiny_model_dir, port=free_port(), python=sys.executable, device="cpu"
    )
    assert engine.refusals(launched) == []
    command = engine.server_command(launched)
    machine, owned = start(tmp_path, list(command.argv))
    try:
        seen: list[Progress] = []
        result = wait_ready(
            machine, owned, engine, command, checkpoint_bytes=10**6, stall_s=120.0, on_progress=seen.append
        )
        assert result.ready, result.reason
        assert seen and seen[-1].done > 0
        drain = engine.drain(command)
        assert drain.running() == 0 and drain.name == "POST /drain"
        drain.begin()
        assert http.get(command.url + "/health", timeout_s=2).status == 503
    finally:
        handle = machine.open(owned.identity)
        assert handle is not None
        machine.signal(handle, 15)
        machine.wait([handle], 30.0)
        assert owned.exit_code() == 0
        machine.reap(owned.identity)
    assert engine.load(command.url) is None
    with pytest.raises(ConnectionRefusedError):  # nobody answers: unknown, never zero; a teardown notes it
        drain.running()


def test_a_real_process_that_dies_is_noticed(tmp_path: Path) -> None:
    code = "import time, sys; time.sleep(1); sys.exit('RuntimeError: no such layer')"
    machine, owned = start(tmp_path, [sys.executable, "-c", code])
    result = wait_ready(machine, owned, get_engine("embedded"), COMMAND, checkpoint_bytes=1, stall_s=60.0)
    machine.reap(owned.identity)
    assert result.outcome is Outcome.DIED and result.seconds < 4.0
    assert "status 1" in result.reason and "no such layer" in result.reason


HANGS = """def where_it_stands():
    time.sleep(600)
import time
print("waiting for a peer", flush=True)
where_it_stands()
"""


def test_a_real_process_that_hangs_is_stalled(tmp_path: Path) -> None:
    machine, owned = start(
        tmp_path,
        [sys.executable, "-c", HANGS],
    )
    result = wait_ready(machine, owned, get_engine("embedded"), COMMAND, checkpoint_bytes=1, stall_s=2.0)
    handle = machine.open(owned.identity)
    assert handle is not None
    machine.signal(handle, 9)
    machine.wait([handle], 10.0)
    machine.reap(owned.identity)
    assert result.outcome is Outcome.STALLED and "waiting for a peer" in result.reason
    assert f"--- pid {owned.pid} 'python" in result.stacks and "where_it_stands (<string>:2)" in result.stacks


class Answers(BaseHTTPRequestHandler):
    completion: tuple[int, bytes] = (200, b'{"choices": [{"text": "a"}]}')

    def do_GET(self) -> None:
        self._say(200, b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._say(*self.completion)

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((200, b'{"choices": [{"text": "a"}]}'), None),
        ((200, b'{"choices": []}'), "without choices"),
        ((503, b"loading"), "answered 503"),
        ((200, b"<html>"), "JSON"),
    ],
)
def test_the_first_token_is_asked_for(answer: tuple[int, bytes], problem: str | None) -> None:
    handler = type("Handler", (Answers,), {"completion": answer})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        if problem is None:
            generate_one_token(url, timeout_s=5)
        else:
            with pytest.raises(http.HttpError, match=problem):
                generate_one_token(url, timeout_s=5)
        server.shutdown()
