"""Adopting servers of others: what is found, what is refused, and that exactly it is taken."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from changeover.machine.errors import InvalidInput
from changeover.machine.local import LocalMachine
from changeover.machine.ports import read_port
from changeover.machine.processes import OpenPath
from changeover.machine.simulated import OWN_PID, SHELL_PID, SimulatedMachine
from changeover.machine.simulated_world import SimulatedGpu, SimulatedProcess
from changeover.teardown.adoption import Tree, TreeRefused, Wish, find_trees, targets_of
from changeover.teardown.audit import Audit
from changeover.teardown.budgets import Budgets
from changeover.teardown.clear_adopted import clear_adopted
from changeover.teardown.clearance import Clearance, Verdict
from changeover.teardown.engine_processes import engine_of, http_port

PYTHON = "/opt/venv/bin/python3.12"


@pytest.mark.parametrize(
    ("command", "engine"),
    [
        (("sglang::scheduler_TP0",), "sglang"),
        (("sglang::detokenizer",), "sglang"),
        (("sgl_diffusion::scheduler_U0",), "sglang"),  # miles_diffusion PR #165: no "sglang" in it
        ((PYTHON, "-m", "sglang.launch_server", "--port", "30000"), "sglang"),
        ((PYTHON, "-u", "-X", "dev", "-m", "sglang.launch_server"), "sglang"),
        (("/opt/venv/bin/sglang", "serve", "--model-path", "m"), "sglang"),
        (("VLLM::EngineCore",), "vllm"),
        (("VLLM::Worker_TP3",), "vllm"),
        (("mine::EngineCore_DP0",), "vllm"),
        ((PYTHON, "/opt/venv/bin/vllm", "serve", "m"), "vllm"),
        (("vllm", "serve", "m"), "vllm"),
        ((PYTHON, "-m", "vllm.entrypoints.openai.api_server"), "vllm"),
        ((PYTHON, "-m", "changeover.engines.embedded", "--model", "m"), "embedded"),
        # and what only looks so (vllm PR #6965, prime-rl PR #2331)
        (("vim", "vllm", "serve"), None),
        (("grep", "sglang::scheduler"), None),
        (("bash", "-c", "vllm serve m; sglang::scheduler"), None),
        ((PYTHON, "-c", "import vllm", "-m", "sglang.launch_server"), None),
        ((PYTHON, "bench.py", "vllm", "serve"), None),
        (("vllm", "bench", "serve"), None),
        (("less", "/opt/venv/bin/vllm"), None),
        ((PYTHON,), None),
        ((), None),
    ],
)
def test_what_looks_like_an_engine_and_what_does_not(command: tuple[str, ...], engine: str | None) -> None:
    assert engine_of(command) == engine


def test_the_port_that_a_command_line_asks_for() -> None:
    assert http_port("vllm", ("vllm", "serve", "m")) == 8000
    assert http_port("sglang", ("sglang", "serve", "--port", "31000")) == 31000
    assert http_port("sglang", ("sglang", "serve", "--port=31001")) == 31001


def vllm_of_somebody(machine: SimulatedMachine, *, leader_dead: bool = False) -> None:
    """A server as a shell's job starts it (own group, the shell's session), with two GPUs' workers and a tracker."""
    job = {"sid": SHELL_PID, "pgid": 900, "uid": 0}
    machine.add(SimulatedProcess(900, ppid=SHELL_PID, command=("vllm", "serve", "m"), ports=(8000,), **job))
    pipe = OpenPath("pipe:[77]", writable=False, mapped=False)
    tracker = (PYTHON, "-c", "from multiprocessing.resource_tracker import main;main(5)")
    machine.add(SimulatedProcess(901, ppid=900, command=tracker, term_s=None, opens=(pipe,), **job))
    machine.add(SimulatedProcess(902, ppid=900, command=("VLLM::EngineCore",), opens=(pipe,), **job))
    for pid in (903, 904):
        gpu = {f"GPU-{pid - 903}": 70_000.0}
        machine.add(SimulatedProcess(pid, ppid=902, command=("VLLM::Worker",), gpu_mib=gpu, **job))
    if leader_dead:
        machine._processes[[one.pid for one in machine._processes].index(900)].dies_at_s = machine.clock.now_s
        machine.clock.sleep(1.0)


def two_gpus() -> SimulatedMachine:
    return SimulatedMachine(gpus=[SimulatedGpu("GPU-0"), SimulatedGpu("GPU-1")])


def found(machine: SimulatedMachine, **wish: object) -> Tree:
    (tree,) = find_trees(machine, Wish(**wish))  # type: ignore[arg-type]
    return tree


def pids(tree: Tree) -> set[int]:
    return {member.identity.pid for member in tree.members}


WHOLE = {900, 901, 902, 903, 904}


@pytest.mark.parametrize("wish", [{"pids": (900,)}, {"ports": (8000,)}, {"engine": "vllm"}])
def test_each_way_of_naming_it_finds_the_whole_tree_with_a_reason_for_each(wish: dict[str, object]) -> None:
    machine = two_gpus()
    vllm_of_somebody(machine)
    machine.clients[8000] = 3
    tree = found(machine, **wish)
    assert pids(tree) == WHOLE and not tree.refusal and all(member.why for member in tree.members)
    assert (tree.engine, tree.ports, tree.clients, tree.url) == ("vllm", (8000,), 3, "http://127.0.0.1:8000")
    assert {member.gpu_mib for member in tree.members} == {None, 70_000.0}
    assert Tree.from_json(tree.to_json()) == tree


def test_vllm_55510_orphans_of_a_dead_leader_are_found_by_their_engine_with_their_tracker() -> None:
    machine = two_gpus()
    vllm_of_somebody(machine, leader_dead=True)
    with pytest.raises(InvalidInput, match="half died"):
        find_trees(machine, Wish(ports=(8000,)))
    with pytest.raises(InvalidInput, match="--engine NAME"):
        find_trees(machine, Wish(pids=(900,)))
    tree = found(machine, engine="vllm")
    assert pids(tree) == WHOLE - {900}
    why = {member.identity.pid: member.why for member in tree.members}
    assert "an orphan: its leader is gone" in why[902] and "its pipe is held by pid 902" in why[901]


def test_a_worker_that_was_named_is_all_that_is_taken() -> None:
    machine = two_gpus()
    vllm_of_somebody(machine)
    assert pids(found(machine, pids=(903,))) == {903}


def test_the_port_of_a_worker_that_inherited_it_leads_to_the_top() -> None:
    machine = SimulatedMachine()
    machine.add(SimulatedProcess(900, command=("gunicorn",), ports=(8000,)))
    machine.add(SimulatedProcess(901, ppid=900, command=("gunicorn: worker",), ports=(8000,)))
    assert pids(found(machine, ports=(8000,))) == {900, 901}


def test_the_script_that_started_it_is_not_part_of_it() -> None:
    machine = SimulatedMachine()
    machine.add(SimulatedProcess(899, ppid=SHELL_PID, command=("bash", "serve.sh")))
    machine.add(SimulatedProcess(900, ppid=899, sid=899, command=("sglang", "serve"), ports=(30000,)))
    assert pids(found(machine, ports=(30000,))) == pids(found(machine, engine="sglang")) == {900}


def test_two_servers_are_two_trees() -> None:
    machine = SimulatedMachine()
    machine.add(SimulatedProcess(900, command=("sglang", "serve"), ports=(30000,)))
    machine.add(SimulatedProcess(910, command=("sglang", "serve"), ports=(30001,)))
    machine.add(SimulatedProcess(911, ppid=910, command=("sglang::scheduler",)))
    assert [pids(tree) for tree in find_trees(machine, Wish(engine="sglang"))] == [{900}, {910, 911}]


@pytest.mark.parametrize("pid", [1, SHELL_PID, OWN_PID])
def test_what_we_hang_on_is_refused(pid: int) -> None:
    assert found(SimulatedMachine(), pids=(pid,)).refusal


def test_another_runs_and_another_users_are_refused() -> None:
    machine = SimulatedMachine()
    machine.add(SimulatedProcess(900, command=("vllm", "serve"), cookie="a run's secret"))
    assert "changeover stop" in found(machine, pids=(900,)).refusal
    machine.add(SimulatedProcess(900, command=("vllm", "serve"), uid=1000))
    assert "name it by --pid" in found(machine, engine="vllm").refusal
    assert not found(machine, pids=(900,)).refusal


def test_a_zombie_holds_nothing_and_that_is_said() -> None:
    machine = SimulatedMachine()
    machine.add(SimulatedProcess(900, unreaped=True, dies_at_s=machine.clock.now_s))
    with pytest.raises(InvalidInput, match="a zombie"):
        find_trees(machine, Wish(pids=(900,)))


def cleared(
    machine: SimulatedMachine | LocalMachine, folder: Path, wish: Wish, **budgets: float
) -> Clearance:
    audit = Audit(folder / f"{time.monotonic_ns()}.jsonl", machine.clock)
    try:
        return clear_adopted(machine, wish, find_trees(machine, wish), audit, budgets=Budgets(**budgets))  # type: ignore[arg-type]
    finally:
        audit.close()


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGEOVER_LOCK_DIR", str(tmp_path))


@pytest.mark.parametrize("leader_dead", [False, True])
def test_exactly_the_tree_is_taken_and_the_gpus_are_judged_without_a_baseline(
    tmp_path: Path, leader_dead: bool
) -> None:
    machine = two_gpus()
    vllm_of_somebody(machine, leader_dead=leader_dead)
    beside = {"sid": SHELL_PID, "pgid": 950, "gpu_mib": {"GPU-1": 3_000.0}}
    machine.add(SimulatedProcess(950, ppid=SHELL_PID, command=("vim", "vllm", "serve"), **beside))
    clearance = cleared(machine, tmp_path, Wish(engine="vllm"))
    assert clearance.verdict is Verdict.CLEAN, clearance.to_text()
    assert machine.signalled_pids() <= WHOLE and 950 not in machine.signalled_pids()
    judged = {one.item: one for one in clearance.evidence}
    assert "3000 MiB (before" in judged["gpu:GPU-1"].expected and judged["gpu:GPU-1"].seen.startswith(
        "3000 MiB"
    )
    assert {one.proof for one in clearance.signals} == {"adopted by the user's word"}


def test_a_refused_tree_is_not_taken_whoever_says_so(tmp_path: Path) -> None:
    machine = SimulatedMachine()
    machine.add(SimulatedProcess(900, command=("vllm", "serve"), cookie="a run's secret"))
    with pytest.raises(TreeRefused):
        cleared(machine, tmp_path, Wish(pids=(900,)))
    assert machine.signals == []


def test_between_the_question_and_the_answer_a_pid_may_change_hands(tmp_path: Path) -> None:
    machine = SimulatedMachine()
    machine.add(SimulatedProcess(900, command=("vllm", "serve")))
    trees = find_trees(machine, Wish(pids=(900,)))
    machine.clock.sleep(5.0)
    machine.add(SimulatedProcess(900, command=("postgres",)))
    audit = Audit(tmp_path / "a.jsonl", machine.clock)
    clearance = clear_adopted(machine, Wish(pids=(900,)), trees, audit, budgets=Budgets())
    assert machine.signals == [] and clearance.verdict is Verdict.CLEAN


def test_what_a_target_knows_of_its_adoption_survives_the_record() -> None:
    machine = two_gpus()
    vllm_of_somebody(machine)
    (target,) = targets_of(find_trees(machine, Wish(engine="vllm")))
    assert set(target.adopted) == target.members and target.cookie not in str(target.to_json())


SERVER = """
import os, signal, socket, subprocess, sys, time
listening = socket.socket()
listening.bind(("127.0.0.1", int(sys.argv[1])))
listening.listen()
os.set_inheritable(listening.fileno(), True)
worker = subprocess.Popen([sys.executable, "-S", "-c", "import signal, time; signal.signal(signal.SIGTERM, "
    "signal.SIG_IGN); time.sleep(600)"], close_fds=False)
open(sys.argv[2], "w").write(str(worker.pid))
time.sleep(600)
"""


@pytest.fixture
def somebodys(tmp_path: Path) -> Iterator[tuple[int, int, int]]:
    """Leader, worker (has inherited the socket, ignores SIGTERM), port; in our own session, as from a shell."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ready = tmp_path / "ready"
    leader = subprocess.Popen([sys.executable, "-S", "-c", SERVER, str(port), str(ready)], process_group=0)
    while not ready.exists() or not ready.read_text():
        time.sleep(0.01)
    worker = int(ready.read_text())
    yield leader.pid, worker, port
    for pid in (leader.pid, worker):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    leader.wait()


@pytest.mark.parametrize("leader_killed", [False, True])
def test_a_real_server_from_our_own_shell_is_taken_by_its_port(
    somebodys: tuple[int, int, int], tmp_path: Path, leader_killed: bool
) -> None:
    """With the leader killed, the worker still holds the port (sglang PR #31645)."""
    leader, worker, port = somebodys
    if leader_killed:
        os.kill(leader, signal.SIGKILL)
        os.waitid(os.P_PID, leader, os.WEXITED | os.WNOWAIT)
    clearance = cleared(
        LocalMachine(), tmp_path, Wish(ports=(port,)), terminate_s=0.5, orphans_s=0.5, ports_s=5.0
    )
    assert clearance.verdict is Verdict.CLEAN, clearance.to_text()
    assert read_port(port).bindable
    assert {one.pid for one in clearance.signals} == ({worker} if leader_killed else {leader, worker})
