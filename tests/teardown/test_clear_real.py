"""Changeovers of real, nasty processes on this machine. Public bugs carry their number."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from changeover.machine.local import LocalMachine
from changeover.teardown.budgets import Budgets
from changeover.teardown.clear import clear
from changeover.teardown.clearance import Clearance, Evidence, Verdict
from changeover.teardown.footprint import Target, take_baseline
from changeover.teardown.leftovers import observe
from tests.machine import nasty
from tests.teardown.conftest import StartNasty

SHORT = Budgets(total_s=40.0, terminate_s=1.0, orphans_s=1.0, kill_s=10.0, ports_s=10.0)


def cleared(machine: LocalMachine, *targets: Target, budgets: Budgets = SHORT) -> Clearance:
    return clear(machine, targets, take_baseline(machine), budgets=budgets)


def signals_to(clearance: Clearance, pid: int) -> list[str]:
    return [one.signal for one in clearance.signals if one.pid == pid]


def evidence(clearance: Clearance, item: str) -> Evidence:
    (one,) = [each for each in clearance.evidence if each.item == item]
    return one


def test_a_willing_process_ends_by_sigterm_in_well_under_a_second(
    machine: LocalMachine, start_nasty: StartNasty
) -> None:
    one = start_nasty("willing")
    clearance = cleared(machine, one.owned.target("server"))
    assert evidence(clearance, "processes").verdict is Verdict.CLEAN
    assert signals_to(clearance, one.pid) == ["SIGTERM", "SIGCONT"]
    assert one.owned.exit_code() == -signal.SIGTERM
    assert not Path(f"/proc/{one.pid}").exists(), "reaped"


def test_ignoring_sigterm_ends_by_sigkill(machine: LocalMachine, start_nasty: StartNasty) -> None:
    one = start_nasty("ignores_sigterm")
    clearance = cleared(machine, one.owned.target("server"))
    assert signals_to(clearance, one.pid) == ["SIGTERM", "SIGCONT", "SIGKILL"]
    assert one.owned.exit_code() == -signal.SIGKILL


def test_a_stopped_process_takes_its_sigterm(machine: LocalMachine, start_nasty: StartNasty) -> None:
    one = start_nasty("stopped")
    clearance = cleared(machine, one.owned.target("server"), budgets=replace(SHORT, terminate_s=20.0))
    assert signals_to(clearance, one.pid) == ["SIGTERM", "SIGCONT"] and not nasty.alive(one.pid)


def test_a_name_with_a_parenthesis_hides_nobody(machine: LocalMachine, start_nasty: StartNasty) -> None:
    one = start_nasty("renamed")
    clearance = cleared(machine, one.owned.target("server"))
    assert clearance.signals[0].comm == "a b) R 1 (x" and not nasty.alive(one.pid)


def test_vllm_55510_workers_survive_a_leader_killed_by_nine(
    machine: LocalMachine, start_nasty: StartNasty
) -> None:
    """vllm-project/vllm #55510: EngineCore watches nobody. Never observed, the session still proves the
    worker.
    """
    one = start_nasty("with_worker")
    os.kill(one.pid, signal.SIGKILL)
    while nasty.alive(one.pid):
        time.sleep(0.01)
    assert nasty.alive(one.worker)
    clearance = cleared(machine, one.owned.target("server"))
    assert not nasty.alive(one.worker) and signals_to(clearance, one.worker)


def test_vllm_34643_the_leader_aborts_before_the_teardown(
    machine: LocalMachine, start_nasty: StartNasty
) -> None:
    one = start_nasty("dies_at_once")
    while one.owned.exit_code() is None:
        time.sleep(0.01)
    assert one.owned.exit_code() == -signal.SIGABRT
    clearance = cleared(machine, one.owned.target("server"))
    assert evidence(clearance, "processes").verdict is Verdict.CLEAN and clearance.signals == ()


def test_sglang_23627_double_fork_and_setsid_found_by_the_cookie(
    machine: LocalMachine, start_nasty: StartNasty
) -> None:
    one = start_nasty("double_fork")
    clearance = cleared(machine, one.owned.target("server"))
    (proof,) = {sent.proof for sent in clearance.signals if sent.pid == one.worker}
    assert "secret" in proof and not nasty.alive(one.worker)


def test_sglang_23627_without_cookie_session_or_parent_it_is_nobodys(
    machine: LocalMachine, start_nasty: StartNasty
) -> None:
    """The twin: it has dropped everything before it was ever seen, and we are no subreaper here."""
    one = start_nasty("double_fork_bare")
    clearance = cleared(machine, one.owned.target("server"))
    assert nasty.alive(one.worker) and signals_to(clearance, one.worker) == []


_AS_SUBREAPER = """
import json, sys
from pathlib import Path
from changeover.machine.local import LocalMachine
from changeover.teardown.budgets import Budgets
from changeover.teardown.clear import clear
from changeover.teardown.footprint import take_baseline
from tests.machine import nasty
machine = LocalMachine(adopt_orphans=True)
baseline = take_baseline(machine)
one = nasty.start(machine, Path(sys.argv[1]), "double_fork_bare", cookie="secret")
clearance = clear(machine, [one.owned.target("server")], baseline, budgets=Budgets(total_s=40.0))
print(json.dumps({"worker": one.worker, "alive": nasty.alive(one.worker), "left": Path(f"/proc/{one.worker}").exists(),
                  "proofs": [sent.proof for sent in clearance.signals if sent.pid == one.worker]}))
"""


def test_sglang_23627_without_the_cookie_a_subreaper_finds_it(tmp_path: Path) -> None:
    """In a process of its own: being a subreaper cannot be undone."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _AS_SUBREAPER, str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert not said["alive"] and not said["left"], "killed, and reaped by us who adopted it"
    assert said["proofs"] and all("subreaper" in proof for proof in said["proofs"])


def test_vllm_43060_recorded_while_the_phase_ran_then_orphaned(
    machine: LocalMachine, start_nasty: StartNasty
) -> None:
    one = start_nasty("with_worker")
    target = observe(machine, one.owned.target("server"))
    assert one.worker in {member.pid for member in target.members}
    os.kill(one.pid, signal.SIGKILL)
    clearance = cleared(machine, target)
    assert not nasty.alive(one.worker)
    assert {sent.proof for sent in clearance.signals if sent.pid == one.worker} == {
        "recorded earlier as ours, with the same start time"
    }


def test_ray_59872_hanging_in_its_own_destructor(machine: LocalMachine, start_nasty: StartNasty) -> None:
    one = start_nasty("hangs_in_its_destructor")
    clearance = cleared(machine, one.owned.target("server"))
    assert "SIGKILL" in signals_to(clearance, one.pid) and not nasty.alive(one.pid)


def test_a_respawner_is_outrun(machine: LocalMachine, start_nasty: StartNasty) -> None:
    one = start_nasty("respawner")
    target = one.owned.target("server")
    cleared(machine, target)
    assert not nasty.alive(one.pid)
    left = [process for process in machine.processes().values() if process.sid == one.pid and process.alive]
    assert left == []


def test_spark_vllm_274_a_zombie_is_released_and_named_with_its_parent(
    machine: LocalMachine, start_nasty: StartNasty
) -> None:
    """eugr/spark-vllm-docker PR #274. The parent is left alive here on purpose: it is another target's."""
    one = start_nasty("does_not_reap")
    zombie = machine.process(int(one.facts["zombie"]))
    assert zombie is not None and zombie.state == "Z" and not zombie.alive
    alone = Target(
        "zombie", cookie="none", leader=zombie.identity, sid=None, members=frozenset({zombie.identity})
    )
    clearance = cleared(LocalMachine(), alone)  # one that has not started the parent itself
    said = evidence(clearance, "processes")
    assert said.verdict is Verdict.CLEAN and f"unreaped by pid {one.pid}" in said.note
    assert clearance.signals == ()


def test_docker_41323_a_zombie_leader_whose_thread_holds_the_port_is_not_gone(
    machine: LocalMachine, start_nasty: StartNasty
) -> None:
    """moby #35160, #41323: /proc/PID/stat says Z and /proc/PID/fd is empty."""
    port = nasty.free_port()
    one = start_nasty("zombie_leader", PORT=str(port))
    leader = machine.process(one.pid)
    assert leader is not None and leader.state == "Z" and leader.alive
    assert not machine.port(port).bindable and one.owned.exit_code() is None
    clearance = cleared(machine, one.owned.target("server", ports=(port,)))
    assert evidence(clearance, f"port:{port}").verdict is Verdict.CLEAN
    assert machine.process(one.pid) is None


def test_sglang_31645_a_worker_has_inherited_the_listening_descriptor(
    machine: LocalMachine, start_nasty: StartNasty
) -> None:
    """The leader is dead, connect still succeeds from the backlog, bind fails: the owner is found by the
    inode.
    """
    port = nasty.free_port()
    one = start_nasty("inherits_the_port", PORT=str(port))
    target = one.owned.target("server", ports=(port,))
    stranger = Target("other", cookie="other", leader=None, sid=None, ports=(port,))
    held = evidence(cleared(machine, stranger), f"port:{port}")
    assert held.verdict is Verdict.FOREIGN_HOLDER and f"pid {one.worker} (python" in held.seen
    clearance = cleared(machine, target)
    assert evidence(clearance, f"port:{port}").verdict is Verdict.CLEAN and not nasty.alive(one.worker)


@pytest.fixture
def strangers_segment() -> Iterator[shared_memory.SharedMemory]:
    segment = shared_memory.SharedMemory(create=True, size=1 << 16)
    yield segment
    segment.close()
    segment.unlink()


def test_the_tracker_is_spared_and_removes_the_segment_of_a_killed_server(
    machine: LocalMachine, start_nasty: StartNasty
) -> None:
    baseline = take_baseline(machine)
    one = start_nasty("segment_with_tracker")
    path = Path("/dev/shm") / one.facts["name"]
    target = one.owned.target("server")
    assert path.exists()
    clearance = clear(machine, [target], baseline, budgets=SHORT)
    assert signals_to(clearance, one.pid)[-1] == "SIGKILL"
    assert signals_to(clearance, one.facts["tracker"]) == [], "it ended by itself, its pipe being closed"
    assert not path.exists() and not nasty.alive(one.facts["tracker"])


def test_the_twin_killing_the_tracker_too_leaks_the_segment(
    machine: LocalMachine, start_nasty: StartNasty
) -> None:
    one = start_nasty("segment_with_tracker")
    path = Path("/dev/shm") / one.facts["name"]
    os.kill(one.facts["tracker"], signal.SIGKILL)
    os.kill(one.pid, signal.SIGKILL)
    while nasty.alive(one.pid):
        time.sleep(0.01)
    assert path.exists()
    path.unlink()


def test_llm_d_352_a_leftover_seen_in_our_hands_is_removed(
    machine: LocalMachine, start_nasty: StartNasty
) -> None:
    baseline = take_baseline(machine)
    one = start_nasty("segment_without_tracker")
    target = observe(machine, one.owned.target("server"))
    assert [segment.path for segment in target.segments] == [one.facts["path"]]
    clearance = clear(machine, [target], baseline, budgets=SHORT)
    assert not Path(one.facts["path"]).exists()
    assert one.facts["path"] in evidence(clearance, "shared-memory").note


def test_cpython_104291_looking_at_a_strangers_segment_does_not_remove_it(
    machine: LocalMachine, start_nasty: StartNasty, strangers_segment: shared_memory.SharedMemory
) -> None:
    one = start_nasty("willing")
    path = f"/dev/shm/{strangers_segment.name}"
    baseline = replace(take_baseline(machine), segments=frozenset())
    clearance = clear(machine, [one.owned.target("server")], baseline, budgets=SHORT)
    assert Path(path).exists()
    assert path in evidence(clearance, "shared-memory").note


def test_files_that_somebody_still_writes_are_said(
    machine: LocalMachine, start_nasty: StartNasty, tmp_path: Path
) -> None:
    folder = tmp_path / "phase"
    folder.mkdir()
    one = start_nasty("writer", WRITES=str(folder / "shard"))
    stranger = Target("other", cookie="other", leader=None, sid=None, files=(str(folder),))
    said = evidence(cleared(machine, stranger), "files")
    assert said.verdict is Verdict.FOREIGN_HOLDER and f"pid {one.worker}" in said.seen
    clearance = cleared(machine, one.owned.target("server", files=(str(folder),)))
    assert evidence(clearance, "files").verdict is Verdict.CLEAN


def test_vllm_6965_decoys_live(machine: LocalMachine, start_nasty: StartNasty, tmp_path: Path) -> None:
    """vllm PR #6965, prime-rl PR #2331, ANTs PR #312: names, arguments and another run's processes."""
    server = start_nasty("with_worker")
    other_run = nasty.start(machine, tmp_path / "other", "ignores_sigterm", cookie="another run's secret")
    shell = ["bash", "-c", "sleep 60; : sglang::scheduler vllm serve launch_server pkill -f python"]
    decoys = [subprocess.Popen(shell, start_new_session=True) for _ in range(2)]
    try:
        cleared(machine, server.owned.target("server"))
        assert not nasty.alive(server.pid) and not nasty.alive(server.worker)
        assert all(decoy.poll() is None for decoy in decoys) and nasty.alive(other_run.pid)
    finally:
        for decoy in decoys:
            os.killpg(decoy.pid, signal.SIGKILL)
            decoy.wait()
        os.kill(other_run.pid, signal.SIGKILL)
        while other_run.owned.exit_code() is None:
            time.sleep(0.01)
        machine.reap(other_run.owned.identity)


def test_wazuh_38733_a_recorded_pid_with_another_start_time_is_a_stranger(
    machine: LocalMachine, start_nasty: StartNasty
) -> None:
    one = start_nasty("willing")
    for wrong in (
        replace(one.owned.identity, start_ticks=one.owned.identity.start_ticks - 1),
        replace(one.owned.identity, boot_id="of-an-earlier-boot"),
    ):
        recorded = Target("old", cookie="old", leader=wrong, sid=wrong.pid, members=frozenset({wrong}))
        assert cleared(machine, recorded).signals == () and nasty.alive(one.pid)


_DIES = """
import json, os, signal, sys
from pathlib import Path
from changeover.machine.local import LocalMachine
from changeover.teardown.footprint import take_baseline
from tests.machine import nasty
machine = LocalMachine()
baseline = take_baseline(machine)
one = nasty.start(machine, Path(sys.argv[1]), "double_fork", cookie=sys.argv[2])
print(json.dumps({"target": one.owned.target("server").to_json(), "baseline": baseline.to_json(),
                  "pids": [one.pid, one.worker]}), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("written", [True, False], ids=["start written down", "start never written down"])
def test_after_kill_nine_of_changeover_a_new_one_finds_everything(
    machine: LocalMachine, tmp_path: Path, written: bool
) -> None:
    root = Path(__file__).parents[2]
    died = subprocess.run(
        [sys.executable, "-c", _DIES, str(tmp_path), "secret-of-the-run"],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert died.returncode == -signal.SIGKILL
    said = json.loads(died.stdout)
    assert all(nasty.alive(pid) for pid in said["pids"])
    target = (
        Target.from_json(said["target"], cookie="secret-of-the-run")
        if written
        else Target("server", cookie="secret-of-the-run", leader=None, sid=None)
    )
    clearance = cleared(machine, target)
    assert not any(nasty.alive(pid) for pid in said["pids"])
    assert evidence(clearance, "processes").verdict is Verdict.CLEAN


_INTERRUPTED = """
import sys, time
from pathlib import Path
from changeover.machine.local import LocalMachine
from changeover.teardown.budgets import Budgets
from changeover.teardown.clear import clear
from changeover.teardown.footprint import take_baseline
from tests.machine import nasty
class Said:
    def stage(self, record): pass
    def sample(self, sample): pass
    def delivered(self, record, delivery): pass
    def intent(self, record):
        if record.signal == "SIGTERM":
            print("terminating", flush=True)
machine = LocalMachine()
baseline = take_baseline(machine)
one = nasty.start(machine, Path(sys.argv[1]), "ignores_sigterm", cookie="secret")
print(one.pid, flush=True)
try:
    clear(machine, [one.owned.target("server")], baseline, budgets=Budgets(terminate_s=2.0), observer=Said())
    print("ended", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_dynamo_1889_ctrl_c_during_a_teardown_takes_effect_after_it(tmp_path: Path) -> None:
    """ai-dynamo/dynamo #1889: Ctrl-C left sglang::scheduler behind. The teardown runs once, to its end."""
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        assert child.stdout.readline() == "terminating\n"
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGINT)
        rest = child.stdout.read()
    assert rest == "interrupted\n" and not nasty.alive(pid)


_RECYCLED = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from changeover.machine.local import LocalMachine
from changeover.teardown.clear import clear
from changeover.teardown.footprint import Target, take_baseline
from changeover.teardown.leftovers import observe
from tests.machine import nasty
machine = LocalMachine()
baseline = take_baseline(machine)
one = nasty.start(machine, Path(sys.argv[1]), "willing", cookie="secret")
target, hold = one.owned.target("server"), machine.open(one.owned.identity)
os.kill(one.pid, signal.SIGKILL)
while one.owned.exit_code() is None:
    time.sleep(0.01)
machine.reap(one.owned.identity)
time.sleep(0.05)
Path("/proc/sys/kernel/ns_last_pid").write_text(str(one.pid - 1))
stranger = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
clearance = clear(machine, [target], baseline)
print(json.dumps({"same_pid": stranger.pid == one.pid, "lives": stranger.poll() is None,
                  "signals": len(clearance.signals), "old_hold": machine.signal(hold, signal.SIGTERM).value}))
stranger.kill()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of one's own needs root")
def test_wazuh_38733_the_kernel_gives_our_pid_and_session_number_to_a_stranger(tmp_path: Path) -> None:
    """wazuh/wazuh PR #38733, for real: in a PID namespace the next pid can be chosen (ns_last_pid)."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", _RECYCLED, str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"same_pid": True, "lives": True, "signals": 0, "old_hold": "gone"}
