"""Is the machine clean now?"""

from __future__ import annotations

from changeover.machine.gpus import GpuProcess
from changeover.machine.processes import OpenPath
from changeover.machine.simulated import SimulatedMachine
from changeover.machine.simulated_world import SimulatedGpu, SimulatedProcess
from changeover.teardown.check import check_machine
from changeover.teardown.clearance import Verdict
from tests.teardown.world import evidence


def test_an_empty_machine_is_clean_and_nothing_was_touched() -> None:
    machine = SimulatedMachine()
    clearance = check_machine(machine)
    assert clearance.clean and machine.signals == [] and machine.unlinked == []
    assert evidence(clearance, "gpus").seen == "no GPU present"


def test_a_run_that_is_alive_is_named_with_its_port_and_its_segments() -> None:
    machine = SimulatedMachine()
    machine.add_segment("/dev/shm/psm_a")
    held = (OpenPath("/dev/shm/psm_a", writable=True, mapped=True),)
    machine.add(SimulatedProcess(600, comm="server", cookie="some run's", ports=(8000,), opens=held))
    machine.add(SimulatedProcess(601, comm="nginx", ports=(80,)))
    clearance = check_machine(machine)
    assert clearance.exit_code == 5
    assert "pid 600 (server)" in evidence(clearance, "runs").seen
    assert "pid 600" in evidence(clearance, "port:8000").seen
    assert "held by pid 600" in evidence(clearance, "shared-memory").note
    assert "port:80" not in {one.item for one in clearance.evidence}
    assert "some run's" not in str(clearance.to_json())


def test_an_engines_segment_that_nobody_holds_is_dirty_and_any_other_is_only_named() -> None:
    machine = SimulatedMachine()
    machine.add_segment("/dev/shm/somebodys-file", inode=1)
    assert check_machine(machine).clean
    machine.add_segment("/dev/shm/nccl-xyz", inode=2)
    clearance = check_machine(machine)
    assert clearance.exit_code == 4 and evidence(clearance, "shared-memory").seen == "/dev/shm/nccl-xyz"


def test_gpus() -> None:
    busy = SimulatedGpu("GPU-0", listed=(GpuProcess(9999, 1.0, "compute"),))
    full = SimulatedGpu("GPU-1", idle_mib=900.0)
    clearance = check_machine(SimulatedMachine(gpus=[busy, full, SimulatedGpu("GPU-2")]))
    verdicts = {one.item: one.verdict for one in clearance.evidence if one.item.startswith("gpu:")}
    assert verdicts == {
        "gpu:GPU-0": Verdict.FOREIGN_HOLDER,
        "gpu:GPU-1": Verdict.DIRTY,
        "gpu:GPU-2": Verdict.CLEAN,
    }


def test_a_hanging_driver_is_unverified() -> None:
    machine = SimulatedMachine(gpus=[SimulatedGpu("GPU-0")])
    machine.driver_hangs = True
    assert check_machine(machine).exit_code == 6
