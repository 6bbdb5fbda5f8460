"""SGLang 0.5.23 on a CPU."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from changeover.machine.local import LocalMachine
from changeover.machine.ports import read_port
from changeover.teardown.clear import clear
from changeover.teardown.clearance import Verdict
from changeover.teardown.drains import drain_for
from changeover.teardown.footprint import StopPolicy, take_baseline
from changeover.teardown.leftovers import observe
from tests.real_engines.conftest import Changeover, left_behind, present
from tests.real_engines.servers import (
    Engine,
    Launched,
    Server,
    clients,
    free_port,
    launched,
    started,
    wait_until_it_generates,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


def test_busy_and_told_to_end_it_drains_without_any_bound(
    sglang: Engine, changeover: Changeover, decoys: list, tmp_path: Path
) -> None:
    """SIGTERM waits for the last request however long that takes, and a second one hurries nothing: the drain is cut
    at its deadline, and the requests lost are counted.
    """
    with (
        started(sglang, tmp_path) as server,
        clients(server.port, str(sglang.model), count=2, tokens=900) as ends,
    ):
        time.sleep(3.0)  # the requests are being answered by then
        server.leader.send_signal(signal.SIGTERM)
        time.sleep(3.0)
        assert server.leader.poll() is None and ends == []
        said = changeover("clear", "--port", str(server.port), "--yes", "--drain-timeout", "3")
        assert said.code == 0 and said.json["verdict"] == "clean", said.text
        assert said.json["lost_requests"] == 2, said.text
        assert server.session() == [] and read_port(server.port).bindable
        assert all(one.poll() is None for one in decoys)


def test_the_detokenizer_is_killed_and_the_rest_stays_up(
    sglang: Engine, changeover: Changeover, tmp_path: Path
) -> None:
    with started(sglang, tmp_path) as server:
        (detokenizer,) = server.pids("sglang::detokenizer")
        os.kill(detokenizer, signal.SIGKILL)
        time.sleep(2.0)
        assert server.leader.poll() is None
        said = changeover("clear", "--engine", "sglang", "--yes", "--terminate-timeout", "5")
        assert said.code == 0 and said.json["verdict"] == "clean", said.text
        assert server.session() == [] and read_port(server.port).bindable


def test_the_fast_lane_of_a_server_that_is_proven_idle(sglang: Engine, tmp_path: Path) -> None:
    """No SIGTERM, which takes it 2.4 to 2.7 s here when it is idle; ``sglang_loads_*`` goes with it."""
    machine = LocalMachine()
    before, baseline, port = present(), take_baseline(machine), free_port()
    owned = launched(sglang, machine, tmp_path, port)
    drain = drain_for("sglang", f"http://127.0.0.1:{port}")
    target = owned.target("server", ports=(port,), drain=drain, stop=StopPolicy.FAST)
    try:
        wait_until_it_generates(Server(Launched(owned), port, owned.log), sglang)
        target = observe(machine, target)
        assert any("sglang_loads" in one.path for one in target.segments) and target.derived_ports
    finally:
        clearance = clear(machine, [target], baseline)
    assert clearance.verdict is Verdict.CLEAN, clearance.to_text()
    assert {one.signal for one in clearance.signals} == {"SIGKILL"}, clearance.to_text()
    (drained,) = [one for one in clearance.stages if one.stage == "drain"]
    assert "own proof" in drained.detail and "fast" in drained.detail
    assert left_behind(before) == []
    print(f"from proven idle to proven clean: {clearance.seconds - drained.seconds:.3f} s")
