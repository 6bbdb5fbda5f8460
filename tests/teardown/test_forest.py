"""Random forests of processes, ours and strangers', with random ways of not ending: what holds of every clear."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from changeover.machine.simulated import OWN_PID, SHELL_PID, SimulatedMachine
from changeover.machine.simulated_world import SimulatedGpu, SimulatedProcess
from changeover.teardown.clearance import Verdict
from changeover.teardown.leftovers import observe
from tests.teardown.world import COOKIE, evidence, start_server

GPU = "GPU-0"
TITLES = [("vllm", "serve"), ("sglang::scheduler",), ("VLLM::Worker",), ("server",), ("python3", "train.py")]
TOTAL_S = 60.0

behaviour = st.fixed_dictionaries(
    {
        "term_s": st.sampled_from([None, 0.0, 0.1, 5.0, 500.0]),
        "kill_s": st.sampled_from([0.05, 0.05, 0.05, 2.0, None]),
        "stopped": st.booleans(),
        "unreaped": st.booleans(),
        "command": st.sampled_from(TITLES),
        "comm": st.sampled_from(["python3", "server", "VLLM::Worker"]),
        "mib": st.sampled_from([0.0, 0.0, 900.0]),
        "release_lag_s": st.sampled_from([0.0, 1.0]),
        "dies_in_s": st.sampled_from([None, None, 0.0, 0.3, 3.0]),
    }
)
# how a worker of ours is still known as ours, or is not
kinship = st.sampled_from(["session", "cookie", "child", "cgroup", "recorded"])
estranged = st.sampled_from(["other cookie", "none", "older", "our shell", "ours in our own session"])


def make(pid: int, script: dict, now_s: float, **more: object) -> SimulatedProcess:
    script = dict(script)
    mib, dies_in_s = script.pop("mib"), script.pop("dies_in_s")
    dies_at_s = None if dies_in_s is None else now_s + dies_in_s
    gpu = {GPU: mib} if mib else {}
    return SimulatedProcess(pid, gpu_mib=gpu, dies_at_s=dies_at_s, **{**script, **more})  # type: ignore[arg-type]


@settings(max_examples=200)
@given(
    ours=st.lists(st.tuples(kinship, behaviour), max_size=5),
    theirs=st.lists(st.tuples(estranged, behaviour), max_size=5),
    leader=behaviour,
    recycled=st.booleans(),
    respawns=st.booleans(),
)
def test_what_holds_of_every_clear(
    ours: list, theirs: list, leader: dict, recycled: bool, respawns: bool
) -> None:
    machine = SimulatedMachine(gpus=[SimulatedGpu(GPU)])
    machine.has_cgroups = True
    old = machine.add(make(450, theirs[0][1], machine.clock.now_s)) if theirs else None
    machine.clock.sleep(10.0)
    script = {key: leader[key] for key in ("term_s", "kill_s", "stopped")}
    server = start_server(machine, **script)
    cgroup = machine.make_cgroup("ours")
    server.leader().cgroup = cgroup
    server.target = replace(server.target, cgroup=cgroup)
    machine.clock.sleep(1.0)
    mine, strangers = {server.owned.pid}, {1, SHELL_PID, OWN_PID} | ({450} if old else set())
    for index, (how, given_script) in enumerate(ours):
        pid = 600 + index
        mine.add(pid)
        ways = {
            "session": {"sid": server.owned.sid},
            "cookie": {"cookie": COOKIE},
            "child": {"ppid": server.owned.pid},
            "recorded": {"ppid": server.owned.pid},
            "cgroup": {"cgroup": cgroup},
        }
        machine.add(make(pid, given_script, machine.clock.now_s, **ways[how]))
    server.target = observe(machine, server.target)
    for index, (how, _) in enumerate(ours):
        one = machine._by_pid[600 + index]
        if how == "recorded" and one.alive:
            one.ppid, one.sid = 1, one.pid  # known from before only
    for index, (how, given_script) in enumerate(theirs):
        pid = 700 + index
        strangers.add(pid)
        ways = {
            "other cookie": {"cookie": "another run's", "ppid": server.owned.pid},
            "none": {},
            "older": {"start_ticks": 1, "sid": server.owned.sid},
            "our shell": {"ppid": SHELL_PID, "sid": SHELL_PID},
            "ours in our own session": {
                "cookie": COOKIE,
                "sid": SHELL_PID,
            },  # proven, and never to be touched
        }
        machine.add(make(pid, given_script, machine.clock.now_s, **ways[how]))
    if recycled and ours and machine._by_pid[600].alive:
        machine.clock.sleep(1.0)
        machine.add(make(600, ours[0][1], machine.clock.now_s))  # the pid is a stranger's from now on
        mine.discard(600)
        strangers.add(600)
    if respawns:
        server.leader().respawns = lambda pid: SimulatedProcess(
            pid, ppid=server.owned.pid, sid=server.owned.sid
        )

    before_s = machine.clock.now_s
    clearance = server.clear(total_s=TOTAL_S, terminate_s=5.0, orphans_s=5.0, kill_s=5.0, gpu_release_s=10.0)

    assert not machine.signalled_pids() & strangers, "a stranger was signalled"
    living = {pid for pid, one in machine.processes().items() if one.alive} - strangers
    said = evidence(clearance, "processes").seen
    reported = living & mine  # what a survivor starts after the last look can be in no report
    assert all(f"pid {pid} " in said for pid in reported), "a process of ours survives unreported"
    used_mib = machine.gpus(1.0).gpus[0].used_mib
    if clearance.verdict is Verdict.CLEAN:
        assert not living and used_mib <= 32.0
    assert machine.clock.now_s - before_s <= TOTAL_S + 3.0, "it took longer than it was given"
