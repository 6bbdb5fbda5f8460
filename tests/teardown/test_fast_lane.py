"""The fast lane: SIGKILL without SIGTERM for a server that is proven idle, and who never gets it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from changeover.machine.processes import OpenPath
from changeover.machine.simulated import SimulatedMachine
from changeover.machine.simulated_world import SimulatedGpu, SimulatedProcess
from changeover.teardown.footprint import StopPolicy
from tests.teardown.world import Server, evidence, start_server

GPU = "GPU-0"


class Says:
    """A drain that says how many requests run, or nothing at all (None)."""

    name = "says"

    def __init__(self, running: int | None) -> None:
        self._running = running

    def begin(self) -> None: ...

    def running(self) -> int | None:
        return self._running

    def proves_idle(self) -> bool:
        return False

    def cut(self) -> None: ...


def fast_server(gpu: SimulatedGpu, *, running: int | None = 0, **script: object) -> Server:
    server = start_server(SimulatedMachine(gpus=[gpu]), gpu_mib={GPU: 9_000.0}, **script)
    server.target = replace(server.target, stop=StopPolicy.FAST, drain=Says(running))
    return server


def signals(server: Server) -> list[str]:
    clearance = server.clear()
    assert clearance.clean, clearance.to_text()
    return [one.signal for one in clearance.signals]


def test_a_server_that_is_proven_idle_is_spared_its_own_slow_end() -> None:
    assert signals(fast_server(SimulatedGpu(GPU), term_s=5.0)) == ["SIGKILL"]


@pytest.mark.parametrize(
    "server",
    [
        pytest.param(lambda: fast_server(SimulatedGpu(GPU), running=None), id="does not say"),
        pytest.param(lambda: fast_server(SimulatedGpu(GPU), running=3), id="is never idle"),
        pytest.param(lambda: fast_server(SimulatedGpu(GPU, mps=True)), id="a client of MPS"),
        pytest.param(
            lambda: fast_server(SimulatedGpu(GPU, vendor="amd", idle_mib=283.0)),
            id="rocm-aiter-2061 on AMD",
        ),
    ],
)
def test_whom_sigkill_might_harm_gets_his_sigterm(server: object) -> None:
    assert signals(server())[0] == "SIGTERM"  # type: ignore[operator]


def test_a_server_that_still_has_a_file_of_the_phase_open_gets_his_sigterm() -> None:
    server = fast_server(SimulatedGpu(GPU))
    server.target = replace(server.target, files=("/states",))
    server.leader().opens = (OpenPath("/states/shard-0", writable=True, mapped=False),)
    assert signals(server)[0] == "SIGTERM"


def test_on_amd_the_baseline_is_what_the_idle_card_had_and_a_lost_context_is_dirty() -> None:
    gone = fast_server(SimulatedGpu(GPU, vendor="amd", idle_mib=283.0))
    clearance = gone.clear()
    assert clearance.clean and "283 MiB" in evidence(clearance, f"gpu:{GPU}").seen
    lost = SimulatedGpu(GPU, vendor="amd", idle_mib=283.0)
    server = fast_server(lost)
    server.machine.add(SimulatedProcess(900, comm="rdcd"))
    died_s = server.machine.clock.now_s
    lost.foreign_mib = lambda now_s: 46_000.0 if now_s > died_s else 0.0
    clearance = server.clear(gpu_release_s=5.0)
    assert clearance.exit_code != 0
    assert "context without a process" in evidence(clearance, f"gpu:{GPU}").note
