"""vLLM 0.32 on a CPU. What each kind of end leaves behind was measured before: see each test."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from changeover.engines.protocol import ServerCommand
from changeover.engines.readiness import Outcome, wait_ready
from changeover.engines.registry import get_engine
from changeover.machine.local import LocalMachine
from changeover.machine.ports import read_port
from changeover.teardown.clear import clear
from changeover.teardown.clearance import Verdict
from changeover.teardown.drains import drain_for
from changeover.teardown.footprint import take_baseline
from changeover.teardown.leftovers import observe
from tests.real_engines.conftest import Changeover, left_behind, present
from tests.real_engines.servers import (
    Engine,
    Launched,
    Server,
    clients,
    free_port,
    half_a_request,
    launched,
    started,
    wait_until_it_generates,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


def test_vllm_55510_the_api_server_is_killed_and_the_rest_keeps_the_memory(
    vllm: Engine, changeover: Changeover, decoys: list, tmp_path: Path
) -> None:
    """EngineCore, worker and resource tracker live on with 2.3 GiB; the port is free: nothing tells of them there.

    Then a server starts on the same port at once, and is ended with requests in flight: on SIGTERM its API process
    alone hangs, waiting for its clients ("Waiting for connections to close"). Whether the three that are being answered
    hold it up is a race that either side wins; the one that never ends its request always does.
    """
    with started(vllm, tmp_path) as server:
        server.leader.send_signal(signal.SIGKILL)
        server.leader.wait()
        until_s = time.monotonic() + 10.0
        while not read_port(server.port).bindable and time.monotonic() < until_s:
            time.sleep(0.1)
        assert (
            read_port(server.port).bindable
            and server.pids("VLLM::EngineCore")
            and server.pids("VLLM::Worker")
        )
        nobody = changeover("clear", "--port", str(server.port), "--yes")
        assert nobody.code == 2 and "half died" in nobody.json["todo"]

        shown = changeover("clear", "--engine", "vllm", "--dry-run")
        (tree,) = shown.json["trees"]
        assert {one["identity"]["pid"] for one in tree["members"]} == set(server.session())
        assert any("resource tracker" in one["why"] for one in tree["members"])
        said = changeover("clear", "--engine", "vllm", "--yes")
        assert said.code == 0 and said.json["verdict"] == "clean", said.text
        assert server.session() == [] and all(one.poll() is None for one in decoys)

        with started(vllm, tmp_path, port=server.port) as again:
            _end_with_requests_in_flight(again, vllm, changeover)
        assert all(one.poll() is None for one in decoys)


def _end_with_requests_in_flight(server: Server, vllm: Engine, changeover: Changeover) -> None:
    answered = clients(server.port, str(vllm.model), count=3, tokens=900)
    with half_a_request(server.port), answered as ends:
        time.sleep(3.0)  # the requests are being answered by then; nothing hangs on it
        server.leader.send_signal(signal.SIGTERM)
        time.sleep(2.0)
        assert server.leader.poll() is None, "it hangs: its clients hold on"
        said = changeover("clear", "--engine", "vllm", "--yes", "--drain-timeout", "5")
        assert said.code == 0 and said.json["verdict"] == "clean", said.text
        assert server.leader.poll() is not None and server.session() == []
    assert len(ends) == 3 and "answered" not in ends


def test_what_changeover_launched_leaves_no_segment_and_no_socket_behind(
    vllm: Engine, tmp_path: Path
) -> None:
    """SIGKILL to the whole group leaves ``psm_*`` in /dev/shm and seven or eight sockets in /tmp, for ever; those that
    were seen in the hands of members are provably ours.
    """
    machine = LocalMachine()
    before, baseline, port = present(), take_baseline(machine), free_port()
    owned = launched(vllm, machine, tmp_path, port)
    url = f"http://127.0.0.1:{port}"
    target = owned.target("server", ports=(port,), drain=drain_for("vllm", url))
    server = Server(Launched(owned), port, owned.log)

    def note() -> None:
        nonlocal target
        target = observe(machine, target)

    try:
        wait_until_it_generates(server, vllm, note)  # one socket is closed again before it is ready
        note()
        assert target.segments and len(target.sockets) >= 4, "it has both while it runs"
        os.killpg(owned.pid, signal.SIGKILL)
    finally:
        clearance = clear(machine, [target], baseline)
    assert clearance.verdict is Verdict.CLEAN, clearance.to_text()
    assert left_behind(before) == []
    items = {one.item.split(":")[0]: one for one in clearance.evidence}
    assert "removed" in items["shared-memory"].note and "removed" in items["sockets"].note


def test_a_core_that_stops_while_it_loads_is_said_to_stall_and_where(vllm: Engine, tmp_path: Path) -> None:
    """The API process waits for it for ever, alive and silent; its stack says for what."""
    machine = LocalMachine()
    baseline, port = take_baseline(machine), free_port()
    owned = launched(vllm, machine, tmp_path, port)
    server = Server(Launched(owned), port, owned.log)
    stopped: set[int] = set()

    def stop_the_core(_: object) -> None:
        for pid in {*server.pids("VLLM::EngineCore"), *server.pids("VLLM::Worker")} - stopped:
            os.kill(pid, signal.SIGSTOP)
            stopped.add(pid)

    try:
        url = f"http://127.0.0.1:{port}"
        command = ServerCommand(argv=(), env={}, ports=(port,), url=url)
        result = wait_ready(
            machine,
            owned,
            get_engine("vllm"),
            command,
            checkpoint_bytes=1,
            stall_s=15.0,
            on_progress=stop_the_core,
        )
    finally:
        clearance = clear(machine, [owned.target("server", ports=(port,))], baseline)
    assert result.outcome is Outcome.STALLED and stopped, result.reason
    assert "nothing moved for 15 s" in result.reason
    parts = {int(part.split()[0]): part for part in result.stacks.split("--- pid ")[1:]}
    assert "vllm/" in parts[owned.pid] and stopped < set(parts)
    assert all("state T" in parts[pid] for pid in stopped)
    assert clearance.verdict is Verdict.CLEAN and server.session() == [], clearance.to_text()


def test_a_worker_is_killed_and_the_server_says_nothing_of_it(
    vllm: Engine, changeover: Changeover, tmp_path: Path
) -> None:
    """The server exits with 0, five seconds later."""
    with started(vllm, tmp_path) as server:
        (worker,) = server.pids("VLLM::Worker")
        os.kill(worker, signal.SIGKILL)
        said = changeover("clear", "--port", str(server.port), "--yes")
        assert said.code == 0 and said.json["verdict"] == "clean", said.text
        assert server.session() == [] and read_port(server.port).bindable
