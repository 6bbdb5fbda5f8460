"""Whole changeovers on a simulated machine: no sleep, every signal recorded. Public bugs carry their
number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from changeover.machine.gpus import GpuProcess
from changeover.machine.processes import OpenPath
from changeover.machine.simulated import OWN_PID, SHELL_PID, SimulatedMachine
from changeover.machine.simulated_world import SimulatedGpu, SimulatedProcess
from changeover.teardown.budgets import Budgets
from changeover.teardown.clear import clear
from changeover.teardown.clearance import Clearance, Verdict
from changeover.teardown.footprint import Target, take_baseline
from changeover.teardown.late_baseline import take_late_baseline
from changeover.teardown.launch import launch
from changeover.teardown.leftovers import observe
from tests.teardown.world import COOKIE, Recorder, evidence, start_server

GPU = "GPU-0"


class Gauge:
    """A drain whose running requests are a function of how often it was asked."""

    name = "gauge"

    def __init__(self, running: Callable[[int], int | None]) -> None:
        self.begun = 0
        self.asked = 0
        self.was_cut = False
        self._running = running

    def begin(self) -> None:
        self.begun += 1

    def running(self) -> int | None:
        self.asked += 1
        return self._running(self.asked)

    def proves_idle(self) -> bool:
        return False

    def cut(self) -> None:
        self.was_cut = True


def test_a_willing_server_ends_by_sigterm_to_its_leader_alone() -> None:
    server = start_server(SimulatedMachine(), ports=(8000,))
    clearance = server.clear()
    assert clearance.verdict is Verdict.CLEAN and clearance.exit_code == 0
    assert [(one.pid, one.signal) for one in clearance.signals] == [
        (server.owned.pid, "SIGTERM"),
        (server.owned.pid, "SIGCONT"),
    ]
    assert clearance.seconds < 1.0


def test_the_intent_is_written_before_each_signal() -> None:
    server = start_server(SimulatedMachine(), term_s=None)
    server.worker(600, term_s=None)
    server.clear()
    assert len(server.recorder.intents) == len(server.machine.signals) > 3
    assert server.recorder.sent_before_intent == list(range(len(server.machine.signals)))


def test_samples_come_at_the_start_at_the_end_and_in_between() -> None:
    server = start_server(SimulatedMachine(), term_s=5.0)
    clearance = server.clear()
    times = [sample.t_s for sample in server.recorder.samples]
    assert times[0] == 0.0 and times[-1] == pytest.approx(clearance.seconds)
    assert max(after - before for before, after in pairwise(times)) <= 0.25 + 1e-6
    assert server.recorder.samples[0].processes == 1 and server.recorder.samples[-1].processes == 0


def test_a_leader_that_ignores_sigterm_is_killed_after_its_time() -> None:
    server = start_server(SimulatedMachine(), term_s=None)
    clearance = server.clear(terminate_s=7.0)
    assert clearance.verdict is Verdict.CLEAN
    assert [one.signal for one in clearance.signals] == ["SIGTERM", "SIGCONT", "SIGKILL"]
    (waited,) = [one for one in clearance.stages if one.stage == "wait"]
    assert waited.outcome == "expired" and waited.seconds == pytest.approx(7.0, abs=0.3)


def test_a_stopped_server_is_woken() -> None:
    server = start_server(SimulatedMachine(), stopped=True)
    clearance = server.clear()
    assert clearance.clean and [one.signal for one in clearance.signals] == ["SIGTERM", "SIGCONT"]


def test_vllm_55510_engine_core_and_workers_survive_a_killed_api_server() -> None:
    """vllm-project/vllm #55510: the port is free and the GPU is full; free ports must not read as clean."""
    server = start_server(SimulatedMachine(gpus=[SimulatedGpu(GPU)]), ports=(8000,))
    server.worker(600, comm="VLLM::EngineCor", gpu_mib={GPU: 70_000.0})
    server.worker(601, comm="VLLM::Worker_TP", gpu_mib={GPU: 70_000.0}, ppid=600)
    server.leader().dies_at_s = server.machine.clock.now_s
    server.machine.clock.sleep(1.0)
    assert server.machine.port(8000).bindable
    clearance = server.clear()
    assert clearance.clean and {600, 601} <= server.machine.signalled_pids()
    assert evidence(clearance, f"gpu:{GPU}").seen.startswith("0 MiB")


def test_vllm_55510_without_any_proof_the_survivors_are_named_and_left_alone() -> None:
    """The twin: no session, no cookie, never seen. They hold the GPU, and that is no proof."""
    server = start_server(SimulatedMachine(gpus=[SimulatedGpu(GPU)]))
    server.machine.add(SimulatedProcess(600, comm="VLLM::EngineCor", gpu_mib={GPU: 70_000.0}))
    clearance = server.clear()
    assert 600 not in server.machine.signalled_pids()
    assert clearance.verdict is Verdict.FOREIGN_HOLDER and clearance.exit_code == 5
    assert "pid 600 (VLLM::EngineCor)" in evidence(clearance, f"gpu:{GPU}").seen


def test_vllm_34643_the_leader_has_died_by_itself_before_the_teardown() -> None:
    server = start_server(SimulatedMachine())
    server.worker(600, term_s=None)
    server.leader().dies_at_s = server.machine.clock.now_s
    clearance = server.clear(orphans_s=2.0)
    assert clearance.clean
    assert [(one.pid, one.signal) for one in clearance.signals] == [
        (600, "SIGTERM"),
        (600, "SIGCONT"),
        (600, "SIGKILL"),
    ]


def test_vllm_43060_three_levels_and_the_middle_dies_first() -> None:
    server = start_server(SimulatedMachine())
    middle = server.worker(600)
    server.worker(601, ppid=600, sid=601, cookie=None)
    server.target = observe(server.machine, server.target)
    middle.dies_at_s = server.machine.clock.now_s
    assert server.clear().clean and 601 in server.machine.signalled_pids()


def test_vllm_43060_not_seen_in_time_the_grandchild_is_not_ours() -> None:
    server = start_server(SimulatedMachine())
    middle = server.worker(600)
    server.worker(601, ppid=600, sid=601, cookie=None)
    middle.dies_at_s = server.machine.clock.now_s
    server.clear()
    assert 601 not in server.machine.signalled_pids()


def test_sglang_23627_a_worker_that_left_session_and_parent_is_found_by_its_cookie() -> None:
    """sgl-project/sglang #23627: schedulers reparented to init, about 100 GB each."""
    server = start_server(SimulatedMachine())
    server.worker(600, ppid=1, sid=600)
    assert server.clear().clean and 600 in server.machine.signalled_pids()


def test_sglang_23627_without_the_cookie_the_subreaper_finds_it() -> None:
    server = start_server(SimulatedMachine(adopts_orphans=True))
    server.worker(600, ppid=OWN_PID, sid=600, cookie=None)
    assert server.clear().clean and 600 in server.machine.signalled_pids()


def test_sglang_23627_an_orphan_of_two_possible_trees_is_not_guessed() -> None:
    machine = SimulatedMachine(adopts_orphans=True)
    server = start_server(machine)
    launch(machine, argv=["job"], env={}, cwd=Path("/"), log=Path("/dev/null"), cookie="the job's")
    server.worker(600, ppid=OWN_PID, sid=600, cookie=None)
    server.clear()
    assert 600 not in machine.signalled_pids()


def test_a_job_that_runs_on_is_not_touched_when_its_server_is_cleared() -> None:
    """The same run started both, so both may carry one secret."""
    machine = SimulatedMachine()
    server = start_server(machine)
    job = launch(machine, argv=["job"], env={}, cwd=Path("/"), log=Path("/dev/null"), cookie=COOKIE)
    machine.add(SimulatedProcess(700, ppid=job.pid, sid=job.sid, cookie=COOKIE))
    assert server.clear().clean
    assert machine.signalled_pids() == {server.owned.pid}


def test_sglang_31645_an_orphan_holds_the_derived_port() -> None:
    """sgl-project/sglang PR #31645: the main port is free, the rpc port is not. All recorded ports are
    verified.
    """
    server = start_server(SimulatedMachine())
    server.target = replace(server.target, ports=(8000, 8001))
    server.machine.add(SimulatedProcess(600, comm="other", ports=(8001,)))
    clearance = server.clear()
    assert evidence(clearance, "port:8000").verdict is Verdict.CLEAN
    assert evidence(clearance, "port:8001").verdict is Verdict.FOREIGN_HOLDER
    assert "pid 600 (other)" in evidence(clearance, "port:8001").seen and clearance.exit_code == 5


def test_nemo_rl_3592_memory_that_never_comes_back_ends_at_the_deadline() -> None:
    """NVIDIA-NeMo/RL PR #3592: 114.95 GiB held for ever; waiting longer never helps."""
    gpu = SimulatedGpu(GPU)
    machine = SimulatedMachine(gpus=[gpu])
    server = start_server(machine)
    gpu.foreign_mib = lambda _now: 114.95 * 1024
    clearance = server.clear(gpu_release_s=30.0)
    held = evidence(clearance, f"gpu:{GPU}")
    assert clearance.verdict is Verdict.DIRTY and clearance.exit_code == 4
    assert "another PID namespace: excluded" in held.note and 30.0 <= clearance.seconds < 35.0


def test_ray_59872_a_server_stuck_in_its_own_shutdown_is_killed() -> None:
    """ray-project/ray PR #59872: SIGTERM was taken and the interpreter hangs in a destructor."""
    server = start_server(SimulatedMachine(), term_s=3600.0)
    assert server.clear(terminate_s=5.0).clean
    assert "SIGKILL" in {name for _, _, name in server.machine.signals}


def test_unsloth_3331_an_unkillable_worker_ends_the_teardown_in_time() -> None:
    """unslothai/unsloth #3331: uvm_spin_loop; SIGKILL is sent once, then it is reported with where it
    hangs.
    """
    server = start_server(SimulatedMachine())
    server.worker(600, term_s=None, kill_s=None)
    clearance = server.clear(orphans_s=1.0, kill_s=5.0)
    assert clearance.verdict is Verdict.UNKILLABLE and clearance.exit_code == 3
    seen = evidence(clearance, "processes").seen
    assert "pid 600" in seen and "state D" in seen and "uvm_spin_loop" in seen
    assert [name for _, pid, name in server.machine.signals if pid == 600].count("SIGKILL") == 1
    assert clearance.seconds < 10.0


def test_gpud_117_a_driver_that_does_not_answer_is_could_not_verify() -> None:
    server = start_server(SimulatedMachine(gpus=[SimulatedGpu(GPU)]))
    server.machine.driver_hangs = True
    clearance = server.clear(probe_s=10.0)
    assert clearance.verdict is Verdict.UNVERIFIED and clearance.exit_code == 6
    assert server.owned.exit_code() is not None, "the hanging driver must not keep the server alive"
    assert clearance.seconds < 20.0


def test_spark_vllm_274_zombies_are_released_and_named_with_the_parent_that_does_not_look() -> None:
    """eugr/spark-vllm-docker PR #274."""
    server = start_server(SimulatedMachine(), term_s=None, kill_s=None)
    server.worker(600, unreaped=True, dies_at_s=1.0)
    clearance = server.clear(terminate_s=1.0, kill_s=1.0, orphans_s=1.0)
    note = evidence(clearance, "processes").note
    assert "pid 600 (worker) unreaped by pid" in note and "(server)" in note


def test_docker_41323_a_zombie_leader_with_a_living_thread_is_not_gone() -> None:
    """moby #35160, #41323: state Z, and a thread still holds the port."""
    server = start_server(SimulatedMachine(), ports=(8000,), term_s=None, main_thread_dead=True)
    clearance = server.clear(terminate_s=1.0)
    assert clearance.clean and "SIGKILL" in {name for _, _, name in server.machine.signals}


def test_vllm_6965_decoys_live() -> None:
    """vllm PR #6965 (pkill python in a benchmark suite), ANTsX/ANTs PR #312."""
    machine = SimulatedMachine()
    server = start_server(machine)
    decoys = [
        SimulatedProcess(700, comm="vim", command=("vim", "sglang serve notes.txt")),
        SimulatedProcess(701, comm="grep", command=("grep", "sglang::")),
        SimulatedProcess(702, comm="python", command=("python", "-m", "sglang.launch_server"), uid=1000),
        SimulatedProcess(703, comm="VLLM::EngineCor", cookie="another run's secret"),
        SimulatedProcess(704, comm="python", sid=SHELL_PID),
    ]
    for decoy in decoys:
        machine.add(decoy)
    assert server.clear().clean
    assert machine.signalled_pids() == {server.owned.pid} and all(decoy.alive for decoy in decoys)


def test_ants_312_two_runs_side_by_side_and_one_is_cleared() -> None:
    machine = SimulatedMachine()
    server = start_server(machine)
    other = launch(
        machine, argv=["server"], env={}, cwd=Path("/"), log=Path("/dev/null"), cookie="the other's"
    )
    machine.add(SimulatedProcess(800, ppid=other.pid, sid=other.sid, cookie="the other's"))
    server.clear()
    assert machine.signalled_pids() == {server.owned.pid} and other.exit_code() is None


def test_another_runs_server_below_ours_is_refused_with_the_reason() -> None:
    server = start_server(SimulatedMachine())
    server.worker(600, cookie="a nested run's")
    clearance = server.clear()
    assert 600 not in server.machine.signalled_pids()
    assert [(one.pid, "another run's secret" in one.reason) for one in clearance.refusals] == [(600, True)]


def test_wazuh_38733_a_recycled_pid_is_a_stranger() -> None:
    """wazuh/wazuh PR #38733: the pid in the file belongs to somebody else by now."""
    machine = SimulatedMachine()
    server = start_server(machine)
    machine.add(SimulatedProcess(server.owned.pid, comm="postgres", start_ticks=999_999))
    clearance = server.clear()
    assert clearance.clean and machine.signals == []


def test_wazuh_38733_a_record_of_an_earlier_boot_names_nobody() -> None:
    machine = SimulatedMachine()
    server = start_server(machine)
    written = server.target.to_json()
    written["leader"]["boot_id"] = written["members"][0]["boot_id"] = "earlier boot"
    earlier = Target.from_json(written, cookie=COOKIE)
    clear(machine, [earlier], server.baseline, observer=Recorder(machine))
    assert machine.signals == []


def test_skyrl_284_a_stranger_took_the_port_between_the_phases() -> None:
    """vllm #7514, NovaSky-AI/SkyRL #284, alibaba/ROLL #87: said with the owner, not killed."""
    server = start_server(SimulatedMachine(), ports=(8000,))
    server.leader().ports = ()
    server.machine.add(SimulatedProcess(600, comm="nginx", ports=(8000,)))
    clearance = server.clear()
    assert clearance.exit_code == 5 and 600 not in server.machine.signalled_pids()


def test_sglang_31645_a_port_that_nobody_visible_holds_is_waited_for_then_dirty() -> None:
    server = start_server(SimulatedMachine(), ports=(8000,))
    server.machine.held_ports.add(8000)
    clearance = server.clear(ports_s=9.0)
    assert clearance.exit_code == 4 and 9.0 <= clearance.seconds < 12.0


def test_llm_d_352_a_crash_loop_leaves_no_segment_behind() -> None:
    """llm-d/llm-d #352: /dev/shm fills with nccl-*; only what was seen in the hands of ours is removed."""
    machine = SimulatedMachine()
    before = set(machine.segments())
    for round_number in range(5):
        server = start_server(machine)
        path = f"/dev/shm/nccl-{round_number}"
        machine.add_segment(path, inode=10 + round_number)
        server.worker(600 + round_number, opens=(OpenPath(path, writable=True, mapped=True),))
        server.target = observe(machine, server.target)
        clearance = server.clear()
        assert clearance.clean and set(machine.segments()) == before
    assert len(machine.unlinked) == 5


def test_llm_d_352_never_seen_in_our_hands_a_segment_is_named_and_stays() -> None:
    server = start_server(SimulatedMachine())
    server.machine.add_segment("/dev/shm/nccl-x")
    clearance = server.clear()
    assert clearance.exit_code == 4 and server.machine.unlinked == []
    assert "/dev/shm/nccl-x" in evidence(clearance, "shared-memory").seen


def test_cpython_104291_a_strangers_segment_survives_our_inventory() -> None:
    server = start_server(SimulatedMachine())
    server.machine.add_segment("/dev/shm/psm_theirs")
    theirs = (OpenPath("/dev/shm/psm_theirs", writable=True, mapped=True),)
    server.machine.add(SimulatedProcess(900, opens=theirs))
    clearance = server.clear()
    assert clearance.clean and server.machine.unlinked == []
    assert "held by pid 900" in evidence(clearance, "shared-memory").note


def test_the_resource_tracker_is_spared_until_everybody_else_is_gone() -> None:
    server = start_server(SimulatedMachine(), term_s=None)
    tracker_command = ("python", "-c", "from multiprocessing.resource_tracker import main;main(5)")
    server.worker(600, command=tracker_command, term_s=None)
    clearance = server.clear(terminate_s=1.0)
    assert clearance.clean
    assert [(pid, name) for _, pid, name in server.machine.signals][-2:] == [
        (server.owned.pid, "SIGKILL"),
        (600, "SIGKILL"),
    ]


def test_ollama_11997_already_at_the_baseline_is_success_at_once() -> None:
    """ollama/ollama #11997: the runner had crashed, no memory was left to fall, and it always timed out."""
    server = start_server(SimulatedMachine(gpus=[SimulatedGpu(GPU)]))
    server.leader().dies_at_s = server.machine.clock.now_s
    clearance = server.clear()
    assert clearance.clean and clearance.seconds < 3.0


def test_ollama_7745_memory_that_comes_late_is_waited_for() -> None:
    """ollama #7745, #7130, #9016: reaped is not released. Late is clean; too late is a failure of its own."""
    server = start_server(
        SimulatedMachine(gpus=[SimulatedGpu(GPU)]), gpu_mib={GPU: 9000.0}, release_lag_s=20.0
    )
    clearance = server.clear()
    assert clearance.clean and 20.0 < clearance.seconds < 23.0
    again = start_server(
        SimulatedMachine(gpus=[SimulatedGpu(GPU)]), gpu_mib={GPU: 9000.0}, release_lag_s=20.0
    )
    assert again.clear(gpu_release_s=5.0).exit_code == 4


def test_llm_d_fma_720_clean_clean_dirty_is_not_clean() -> None:
    """llm-d-incubation/llm-d-fast-model-actuation #720: verified 0, and 16.9 GiB were free at the start."""
    gpu = SimulatedGpu(GPU)
    machine = SimulatedMachine(gpus=[gpu])
    server = start_server(machine)
    start_s = machine.clock.now_s
    gpu.foreign_mib = lambda now: 0.0 if now < start_s + 0.3 else 60_000.0
    assert server.clear(gpu_release_s=4.0).exit_code == 4


def test_lmcache_4851_one_dirty_gpu_of_eight_fails_the_whole() -> None:
    gpus = [SimulatedGpu(f"GPU-{index}") for index in range(8)]
    server = start_server(SimulatedMachine(gpus=gpus))
    gpus[5].foreign_mib = lambda _now: 400.0
    clearance = server.clear(gpu_release_s=2.0)
    assert clearance.exit_code == 4
    dirty = [one.item for one in clearance.evidence if one.verdict is Verdict.DIRTY]
    assert dirty == ["gpu:GPU-5"]


def test_vllm_omni_4165_half_a_gib_on_an_idle_gpu_is_its_baseline() -> None:
    xorg = SimulatedProcess(300, comm="Xorg")
    gpu = SimulatedGpu(GPU, idle_mib=512.0, listed=(GpuProcess(300, 500.0, "graphics"),))
    machine = SimulatedMachine(gpus=[gpu])
    machine.add(xorg)
    server = start_server(machine, gpu_mib={GPU: 9000.0})
    clearance = server.clear()
    assert clearance.clean and xorg.alive and machine.signalled_pids() == {server.owned.pid}


def test_nvitop_75_impossible_pids_are_an_untrusted_list() -> None:
    """XuehaiPan/nvitop #75: struct layouts changed and pids came out scrambled."""
    gpu = SimulatedGpu(GPU)
    server = start_server(SimulatedMachine(gpus=[gpu]))
    gpu.foreign_mib, gpu.listed = lambda _now: 9000.0, (GpuProcess(4_000_000_000, 1.0, "compute"),)
    clearance = server.clear(gpu_release_s=2.0)
    assert clearance.verdict is Verdict.UNVERIFIED and "4000000000" in evidence(clearance, f"gpu:{GPU}").seen


def test_nvidia_docker_1483_host_pids_that_name_local_processes_kill_nobody() -> None:
    gpu = SimulatedGpu(GPU)
    machine = SimulatedMachine(gpus=[gpu])
    server = start_server(machine)
    machine.add(SimulatedProcess(900, comm="postgres"))
    gpu.foreign_mib, gpu.listed = lambda _now: 9000.0, (GpuProcess(900, 9000.0, "compute"),)
    assert server.clear(gpu_release_s=2.0).exit_code == 5
    assert machine.signalled_pids() == {server.owned.pid}


def test_vllm_omni_2317_pids_of_another_namespace_are_a_foreign_holder() -> None:
    """vllm-project/vllm-omni #2317: after docker rm -f the workers are invisible here."""
    gpu = SimulatedGpu(GPU)
    server = start_server(SimulatedMachine(gpus=[gpu]))
    gpu.foreign_mib, gpu.listed = lambda _now: 9000.0, (GpuProcess(31_000, 9000.0, "compute"),)
    clearance = server.clear(gpu_release_s=2.0)
    assert clearance.exit_code == 5 and "namespace" in evidence(clearance, f"gpu:{GPU}").note


def test_pytorch_32575_a_client_of_mps_is_not_killed() -> None:
    """pytorch/pytorch #32575, sglang-omni PR #1635: SIGKILL under MPS hangs CUDA for everybody."""
    server = start_server(SimulatedMachine(gpus=[SimulatedGpu(GPU, mps=True)]), term_s=None)
    server.worker(600, term_s=None, gpu_mib={GPU: 900.0})
    clearance = server.clear(terminate_s=1.0, orphans_s=1.0, kill_s=1.0, gpu_release_s=1.0)
    assert (600, "SIGKILL") not in {(pid, name) for _, pid, name in server.machine.signals}
    assert clearance.exit_code == 3 and "MPS" in evidence(clearance, "processes").seen


def test_pytorch_32575_a_client_of_mps_is_ended_through_its_daemon_first() -> None:
    server = start_server(SimulatedMachine(gpus=[SimulatedGpu(GPU, mps=True)]))
    server.machine.has_mps_control = True
    server.worker(600, term_s=None, gpu_mib={GPU: 900.0})
    assert server.clear(terminate_s=1.0, orphans_s=1.0, kill_s=5.0).clean
    assert server.machine.ended_mps_clients == [600]


def test_sglang_omni_1635_mps_itself_is_never_signalled() -> None:
    server = start_server(SimulatedMachine(gpus=[SimulatedGpu(GPU)]))
    server.worker(601, comm="nvidia-cuda-mps", term_s=None)
    server.clear(terminate_s=1.0, orphans_s=1.0, kill_s=1.0)
    assert 601 not in server.machine.signalled_pids()


def test_memory_that_an_importer_keeps_is_said_to_be_his() -> None:
    """Measured on an H200: 20 GiB exported by CUDA IPC stay with the importer and are charged to him from then on."""
    machine = SimulatedMachine(gpus=[SimulatedGpu(GPU)])
    server = start_server(machine)
    server.worker(600, gpu_mib={GPU: 21_000.0})
    importer = machine.add(SimulatedProcess(700, comm="importer", gpu_mib={GPU: 500.0}))
    importer.imports_from = 600
    clearance = server.clear()
    held = evidence(clearance, f"gpu:{GPU}")
    assert clearance.exit_code == 5 and 700 not in machine.signalled_pids()
    assert "pid 700 (importer)" in held.seen and "21000 MiB more since ours ended" in held.seen


def test_a_fresh_context_that_fails_is_dirty_and_one_that_hangs_is_unverified() -> None:
    broken = start_server(
        SimulatedMachine(gpus=[SimulatedGpu(GPU, context_error="cuInit: not initialised (3)")])
    )
    assert broken.clear().exit_code == 4
    hanging = start_server(SimulatedMachine(gpus=[SimulatedGpu(GPU, context_hangs=True)]))
    assert hanging.clear().exit_code == 6


def test_the_children_for_fresh_contexts_are_started_with_the_first_signal_and_not_during_a_drain() -> None:
    server = start_server(SimulatedMachine(gpus=[SimulatedGpu(GPU)]), term_s=None)
    server.target = replace(server.target, drain=Gauge(lambda asked: max(0, 5 - asked)))
    started_s = server.machine.clock.now_s
    clearance = server.clear()
    drained_s = next(one.seconds for one in clearance.stages if one.stage == "drain")
    assert server.machine.prepared_contexts == [(pytest.approx(started_s + drained_s, abs=0.1), (GPU,))]


def test_a_gpu_that_asks_for_a_reset_is_no_place_for_the_next_phase() -> None:
    sick = SimulatedGpu(GPU, health=("the driver asks for: GPU reset",))
    assert start_server(SimulatedMachine(gpus=[sick])).clear().exit_code == 6


def test_a_gpu_of_the_baseline_that_is_missing_is_unverified() -> None:
    machine = SimulatedMachine(gpus=[SimulatedGpu(GPU), SimulatedGpu("GPU-1")])
    server = start_server(machine)
    del machine.simulated_gpus["GPU-1"]
    assert server.clear().exit_code == 6


def test_without_a_gpu_the_evidence_says_so() -> None:
    clearance = start_server(SimulatedMachine()).clear()
    assert evidence(clearance, "gpus").seen == "no GPU present" and clearance.clean


def test_by_a_late_baseline_memory_that_nobody_is_listed_for_is_dirty() -> None:
    machine = SimulatedMachine(gpus=[SimulatedGpu(GPU, foreign_mib=lambda _now_s: 500.0)])
    server = start_server(machine)
    assert clear(machine, [server.target], take_late_baseline(machine, [server.target])).exit_code == 4


def test_dynamo_14279_a_gauge_that_never_falls_ends_at_the_deadline_with_the_number_lost() -> None:
    """ai-dynamo/dynamo PR #14279: the grace period took new work."""
    server = start_server(SimulatedMachine())
    gauge = Gauge(lambda _asked: 3)
    server.target = replace(server.target, drain=gauge)
    clearance = server.clear(drain_s=10.0)
    assert clearance.lost_requests == 3 and gauge.begun == 1
    (drained,) = [one for one in clearance.stages if one.stage == "drain"]
    assert drained.outcome == "expired" and "3 requests" in drained.detail
    assert drained.seconds == pytest.approx(13.0, abs=0.3) and gauge.was_cut, "3 s for the aborts to be seen"


def test_vllm_24885_work_in_flight_ends_before_sigterm() -> None:
    server = start_server(SimulatedMachine())
    gauge = Gauge(lambda asked: max(0, 5 - asked))
    server.target = replace(server.target, drain=gauge)
    clearance = server.clear()
    assert clearance.clean and clearance.lost_requests is None and gauge.asked == 6
    assert clearance.stages[1].stage == "drain" and clearance.stages[1].outcome == "proved"


def test_a_drain_that_raises_stops_no_teardown() -> None:
    def broken(_asked: int) -> int:
        raise ConnectionRefusedError("connection refused")

    server = start_server(SimulatedMachine())
    server.target = replace(server.target, drain=Gauge(broken))
    clearance = server.clear(drain_s=1.0)
    assert clearance.clean
    assert "ConnectionRefusedError" in next(one.detail for one in clearance.stages if one.stage == "drain")


def test_a_respawner_is_outrun() -> None:
    server = start_server(SimulatedMachine())
    supervisor = server.worker(600, term_s=None)
    supervisor.respawns = lambda pid: SimulatedProcess(pid, ppid=600, sid=supervisor.sid, cookie=COOKIE)
    server.worker(601, ppid=600)
    assert server.clear(orphans_s=1.0).clean
    assert all(not one.alive for one in server.machine._processes if one.cookie == COOKIE)


def test_another_users_process_of_ours_that_the_kernel_protects_is_reported() -> None:
    server = start_server(SimulatedMachine())
    server.worker(600, uid=1000, denies_signals=True)
    clearance = server.clear(orphans_s=1.0, kill_s=1.0)
    assert clearance.exit_code == 3 and "denied" in evidence(clearance, "processes").seen


def test_after_a_crash_a_new_changeover_needs_only_what_was_written_down() -> None:
    """The old Changeover is gone (kill -9): we are not the parent, hold no pidfd, and have the secret."""
    machine = SimulatedMachine()
    server = start_server(machine, term_s=None)
    server.worker(600, ppid=1, sid=600)
    machine._spawned.clear()
    server.leader().ppid = 1
    resumed = Target.from_json(server.target.to_json(), cookie=COOKIE)
    clearance = clear(machine, [resumed], server.baseline, budgets=Budgets(terminate_s=1.0))
    assert clearance.clean and {600, server.owned.pid} == machine.signalled_pids()


def test_died_between_starting_and_writing_it_down_the_cookie_finds_the_server() -> None:
    machine = SimulatedMachine()
    server = start_server(machine)
    machine._spawned.clear()
    server.leader().ppid = 1
    unwritten = Target("server", cookie=COOKIE, leader=None, sid=None)
    assert clear(machine, [unwritten], server.baseline).clean
    assert machine.signalled_pids() == {server.owned.pid}


def test_run_from_inside_its_own_server_nothing_above_us_is_signalled() -> None:
    machine = SimulatedMachine()
    shell = next(one for one in machine._processes if one.pid == SHELL_PID)
    shell.cookie = COOKIE
    inside = Target("server", cookie=COOKIE, leader=None, sid=None)
    clearance = clear(machine, [inside], take_baseline(machine), budgets=Budgets(orphans_s=1.0))
    assert machine.signals == [] and clearance.exit_code == 3
    assert "ancestor" in evidence(clearance, "processes").seen


def test_nothing_to_clear_is_clean_at_once() -> None:
    machine = SimulatedMachine()
    clearance = clear(machine, [], take_baseline(machine))
    assert clearance.clean and clearance.seconds < 0.2


def test_a_clearance_survives_its_json() -> None:
    server = start_server(SimulatedMachine(gpus=[SimulatedGpu(GPU)]), ports=(8000,), term_s=None)
    clearance = server.clear(terminate_s=1.0)
    again = Clearance.from_json(clearance.to_json())
    assert again.to_json() == clearance.to_json() and again.to_text() == clearance.to_text()
    assert COOKIE not in str(clearance.to_json()) and COOKIE not in str(server.target.to_json())
    assert COOKIE not in repr(server.target) and COOKIE not in repr(server.owned)


scripts = st.fixed_dictionaries(
    {
        "ppid": st.sampled_from([1, 2, SHELL_PID, OWN_PID, 501, 600, 601]),
        "sid": st.sampled_from([1, SHELL_PID, 501, 600, 650, 700]),
        "cookie": st.sampled_from([None, COOKIE, "another run's"]),
        "term_s": st.sampled_from([None, 0.1, 30.0]),
        "kill_s": st.sampled_from([None, 0.05, 3.0]),
        "stopped": st.booleans(),
        "unreaped": st.booleans(),
        "comm": st.sampled_from(["python", "sshd", "VLLM::Worker"]),
        "start_ticks": st.sampled_from([5, 100_001]),
        "denies_signals": st.booleans(),
    }
)


@settings(max_examples=50, deadline=None)
@given(
    workers=st.lists(scripts, max_size=7),
    total_s=st.floats(0.5, 300.0),
    hangs=st.booleans(),
    adopts=st.booleans(),
    respawns=st.booleans(),
)
def test_whatever_lives_on_the_machine_no_stranger_is_signalled_and_the_total_is_kept(
    workers: list[dict[str, object]], total_s: float, hangs: bool, adopts: bool, respawns: bool
) -> None:
    machine = SimulatedMachine(gpus=[SimulatedGpu(GPU)], adopts_orphans=adopts)
    server = start_server(machine, ports=(8000,))
    strangers = {1, SHELL_PID, OWN_PID}
    for pid, script in enumerate(workers, start=600):
        process = machine.add(SimulatedProcess(pid, **script))  # type: ignore[arg-type]
        if respawns and pid == 600:
            process.respawns = lambda new: SimulatedProcess(new, ppid=600, cookie=COOKIE, term_s=None)
    machine.driver_hangs = hangs
    born_of = {one.pid: one.ppid for one in machine._processes}
    clearance = server.clear(total_s=total_s, sample_s=total_s / 40)
    ours = {server.owned.pid}
    growing = True
    while (
        growing
    ):  # the widest set that any proof could give: below ours, our session, our secret, handed to us
        more = {
            one.pid
            for one in machine._processes
            if one.pid not in strangers | ours
            and one.cookie != "another run's"
            and (
                one.cookie == COOKIE
                or one.sid == server.owned.sid
                or born_of.get(one.pid) in {*ours, OWN_PID}
            )
        }
        growing, ours = bool(more), ours | more
    assert machine.signalled_pids() <= ours
    for one in machine._processes:
        if one.comm == "sshd" or one.sid == SHELL_PID or one.cookie == "another run's" or one.pid <= 1:
            assert one.pid not in machine.signalled_pids()
    assert clearance.seconds <= total_s * 1.1 + 0.5
    assert clearance.exit_code in (0, 3, 4, 5, 6)
    if any(one.alive for one in machine._processes if one.cookie == COOKIE and one.start_ticks > 99_999):
        assert clearance.exit_code == 3
