"""Loads, deaths, drains and data-parallel ranks of SGLang and vLLM, played by processes that give recorded answers.

The command lines, the waiting, the counting and the clearing are the real ones.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

import pytest

from changeover.bench.acceptance import acceptance_between, read_counters, speculation_names
from changeover.engines.protocol import LaunchSpec, ServerCommand
from changeover.engines.readiness import Outcome, Readiness, wait_ready
from changeover.engines.registry import get_engine
from changeover.engines.versions import installed_version
from changeover.machine.local import LocalMachine
from changeover.machine.progress import Progress
from changeover.pipeline.commands import free_port
from changeover.teardown.budgets import Budgets
from changeover.teardown.clear import clear
from changeover.teardown.clearance import Clearance
from changeover.teardown.footprint import StopPolicy, take_baseline
from changeover.teardown.launch import Owned, launch
from changeover.teardown.leftovers import observe
from tests.mock_engines import RECORDED, Scenario, make_environment

KINDS = ("sglang", "vllm")


@dataclass
class Mock:
    """A mock that was started as a pipeline starts an engine."""

    kind: str
    owned: Owned
    command: ServerCommand
    machine: LocalMachine
    answered: list[int] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.command.url

    def wait(self, stall_s: float = 60.0, seen: Callable[[Progress], None] = lambda _: None) -> Readiness:
        return wait_ready(
            self.machine,
            self.owned,
            get_engine(self.kind),
            self.command,
            checkpoint_bytes=1000,
            stall_s=stall_s,
            on_progress=seen,
        )

    def ask(self) -> threading.Thread:
        """One request, in a thread of its own; its status is in ``answered`` where it was not cut off."""
        body = json.dumps({"model": "mock", "messages": [], "max_tokens": 6}).encode()

        def send() -> None:
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(self.url + "/v1/chat/completions", body, headers)
            with suppress(OSError, HTTPException), urllib.request.urlopen(request) as answer:
                answer.read()
                self.answered.append(answer.status)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        return thread

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(self.url + "/metrics") as answer:
            return read_counters(answer.read().decode())

    def clear(self, stop: StopPolicy = StopPolicy.GRACEFUL, **budgets: float) -> Clearance:
        drain = get_engine(self.kind).drain(self.command)
        target = observe(
            self.machine, self.owned.target("mock", ports=self.command.ports, drain=drain, stop=stop)
        )
        return clear(self.machine, [target], self._baseline, budgets=Budgets(**budgets))

    def __post_init__(self) -> None:
        self._baseline = take_baseline(self.machine)


Start = Callable[..., Mock]


@pytest.fixture(scope="session")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make_environment(kind, tmp_path_factory.mktemp(f"mock-{kind}") / "venv") for kind in KINDS}


@pytest.fixture
def start(pythons: dict[str, Path], tmp_path: Path) -> Iterator[Start]:
    """``start(kind, **scenario)``; what is left at the end of the test is killed."""
    machine, started = LocalMachine(), []

    def begin(kind: str, **scenario: object) -> Mock:
        python = str(pythons[kind])
        spec = LaunchSpec("production", Path("/nowhere"), free_port(), python, served_name="mock")
        command = get_engine(kind).server_command(spec)
        env = {**command.env, **Scenario(**scenario).environment()}  # type: ignore[arg-type]
        owned = launch(
            machine, argv=list(command.argv), env=env, cwd=tmp_path, log=tmp_path / "log", cookie="mock"
        )
        started.append(owned)
        return Mock(kind, owned, command, machine)

    yield begin
    for owned in started:
        with suppress(ProcessLookupError):
            os.killpg(owned.pid, signal.SIGKILL)


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < limit_s


def wait_until(what: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20
    while not what():
        assert time.monotonic() < until_s
        time.sleep(0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_load_is_waited_for_and_its_first_token_is_the_proof(start: Start, kind: str) -> None:
    mock = start(kind, load_s=2.0)
    seen: list[Progress] = []
    ready = mock.wait(stall_s=1.5, seen=seen.append)
    assert ready.ready and ready.seconds >= 2.0, "longer than a stall may last, and never silent"
    assert seen and all(one.stage == "loading" for one in seen)


@pytest.mark.parametrize("kind", KINDS)
def test_silence_while_it_loads_is_a_stall_with_the_last_line_and_the_stacks(start: Start, kind: str) -> None:
    ready = start(kind, load_s=600.0, stalls_at_s=0.3).wait(stall_s=1.5)
    assert ready.outcome is Outcome.STALLED
    assert "Loading safetensors checkpoint shards" in ready.reason
    assert "load (" in ready.stacks and "server.py" in ready.stacks


LAST_WORDS = {
    "sglang": (
        "[2026-12-07 12:00:00] Scheduler hit an exception: Traceback (most recent call last):",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "[2026-12-07 12:00:01] Received sigquit from a child process. It usually means the child failed.",
    ),
    "vllm": (
        "(EngineCore pid=7) ValueError: Free memory on device cuda:0 (12.0/139.8 GiB) on startup is less than desired",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_death_in_the_load_is_noticed_in_under_3_s_with_its_reason(start: Start, kind: str) -> None:
    mock = start(kind, load_s=60.0, dies_at_s=0.5, last_words=LAST_WORDS[kind])
    with within(0.5 + 3.0):
        ready = mock.wait()
    assert ready.outcome is Outcome.DIED and "status 1" in ready.reason
    wanted = {"sglang": "CUDA out of memory", "vllm": "Engine core initialization failed"}[kind]
    assert wanted in ready.reason


@pytest.mark.parametrize("kind", KINDS)
def test_what_runs_is_summed_over_data_parallel_ranks(start: Start, kind: str) -> None:
    mock = start(kind, request_s=None)
    assert mock.wait().ready
    engine = get_engine(kind)
    assert engine.load(mock.url).total == 0  # type: ignore[union-attr]
    for _ in range(3):
        mock.ask()
    wait_until(lambda: engine.load(mock.url).running == 3)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_requests_in_flight_end_before_the_server_is_told_to(start: Start, kind: str) -> None:
    mock = start(kind, request_s=1.0)
    assert mock.wait().ready
    asked = [mock.ask() for _ in range(4)]
    wait_until(lambda: get_engine(kind).load(mock.url).running == 4)  # type: ignore[union-attr]
    clearance = mock.clear()
    assert clearance.clean and not clearance.lost_requests
    for one in asked:
        one.join(1.0)
    assert mock.answered == [200] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_drain_that_cannot_end_is_cut_and_what_is_lost_is_counted(start: Start, kind: str) -> None:
    mock = start(kind, request_s=None)
    assert mock.wait().ready
    for _ in range(3):
        mock.ask()
    wait_until(lambda: get_engine(kind).load(mock.url).running == 3)  # type: ignore[union-attr]
    with within(15.0):
        clearance = mock.clear(drain_s=1.0, drain_cap_s=1.0)
    assert clearance.clean and clearance.lost_requests == 3 and mock.answered == []


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_ignores_sigterm_and_leaves_workers_in_sessions_of_their_own_is_gone(
    start: Start, kind: str
) -> None:
    mock = start(kind, ignores_sigterm=True, workers=8)
    assert mock.wait().ready
    clearance = mock.clear(terminate_s=0.5)
    assert clearance.clean
    assert mock.machine.process(mock.owned.pid) is None or mock.owned.exit_code() == -signal.SIGKILL
    ours = [one for one in mock.machine.processes().values() if one.ppid == mock.owned.pid]
    assert ours == []


def test_acceptance_is_a_delta_over_both_ranks_and_not_the_servers_lifetime(start: Start) -> None:
    """sglang #34743: a length from rank 0 alone, since the server began."""
    mock = start("vllm", drafts=10, accepted=7)
    assert mock.wait().ready
    before = mock.metrics()
    assert before["vllm:spec_decode_num_drafts_total"] > 0, "the recording has a lifetime"
    for _ in range(4):  # two on each rank
        mock.ask().join(10)
    found, reason = acceptance_between(before, mock.metrics(), speculation_names("vllm"))
    assert reason is None and found is not None
    assert (found.drafts, found.draft_tokens, found.accepted_tokens) == (40, 120, 28)
    assert found.length == pytest.approx(1.7)


@pytest.mark.parametrize("kind", KINDS)
def test_the_recording_is_of_the_version_that_the_mock_says(pythons: dict[str, Path], kind: str) -> None:
    record = json.loads((RECORDED / f"{kind}.json").read_text())
    assert installed_version(kind, str(pythons[kind])) == record["version"]
    assert "--dp-size" in record["argv"] or "--data-parallel-size" in record["argv"]
