"""Random forests around a server of somebody else's that was shown and then taken: what holds of every such clear."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from changeover.machine.simulated import OWN_PID, SHELL_PID, SimulatedMachine
from changeover.machine.simulated_world import SimulatedGpu
from changeover.teardown.adoption import Wish, find_trees, pinned, targets_of
from changeover.teardown.budgets import Budgets
from changeover.teardown.clear import clear
from changeover.teardown.clearance import Verdict
from changeover.teardown.late_baseline import take_late_baseline
from tests.teardown.test_forest import GPU, TOTAL_S, behaviour, make
from tests.teardown.world import evidence

ROOT = 600
LOOKS = [("vllm", "serve", "m"), ("VLLM::EngineCore",), ("VLLM::Worker",), ("sleep", "600")]
wishes = st.sampled_from([Wish(pids=(ROOT,)), Wish(ports=(8000,)), Wish(engine="vllm")])
# below whom a member of the tree hangs: an index into those before it
below = st.integers(min_value=0, max_value=5)
# a stranger with the same titles: in the server's session, its group, the shell's job, or on its own
strange = st.sampled_from(["same session", "same group", "shell", "alone", "above"])
# what happens between the question and the answer
meanwhile = st.tuples(
    st.sampled_from(["a child is born", "a member dies", "a pid changes hands", "a look-alike comes"]),
    st.integers(min_value=0, max_value=5),  # whose child, which member
    behaviour,
)


@settings(max_examples=300)
@given(
    wish=wishes,
    members=st.lists(st.tuples(below, behaviour), max_size=5),
    theirs=st.lists(st.tuples(strange, behaviour), max_size=4),
    leader=behaviour,
    then=st.lists(meanwhile, min_size=1, max_size=4),
    leader_dead=st.booleans(),
)
def test_what_holds_of_every_adopted_clear(
    wish: Wish, members: list, theirs: list, leader: dict, then: list, leader_dead: bool
) -> None:
    machine = SimulatedMachine(gpus=[SimulatedGpu(GPU)])
    job = {"sid": SHELL_PID, "pgid": ROOT}
    root = machine.add(
        make(
            ROOT,
            {**leader, "dies_in_s": None},
            machine.clock.now_s,
            command=LOOKS[0],
            ppid=SHELL_PID,
            ports=(8000,),
            **job,
        )
    )
    tree = [root]
    for index, (parent, script) in enumerate(members):
        above = tree[parent % len(tree)]
        title = LOOKS[1 + index % 3]
        one = make(ROOT + 1 + index, script, machine.clock.now_s, ppid=above.pid, command=title, **job)
        tree.append(machine.add(one))
    strangers = {1, SHELL_PID, OWN_PID}
    for index, (where, script) in enumerate(theirs):
        ways = {
            "same session": {"sid": SHELL_PID},
            "same group": {"sid": SHELL_PID, "pgid": ROOT, "command": ("vim", "vllm", "serve")},
            "shell": {"ppid": SHELL_PID, "sid": SHELL_PID},
            "alone": {},
            "above": {"ppid": 1, "uid": 1000},
        }
        # an engine's own process would be one more server that `--engine` names: these only have its words
        given_command = {"command": ("bash", "-c", "vllm serve m; VLLM::Worker"), **ways[where]}
        machine.add(make(700 + index, script, machine.clock.now_s, **given_command))
        strangers.add(700 + index)
    machine.clock.sleep(2.0)
    if leader_dead and wish.engine:
        root.dies_at_s = machine.clock.now_s
        machine.clock.sleep(0.5)
    if not wish.engine and not root.alive:
        return
    trees = find_trees(machine, wish)
    shown = {one.identity.pid for tree in trees for one in tree.members}
    if any(tree.refusal for tree in trees):
        assert not machine.signals
        return
    assert not shown & strangers, "a stranger is taken for a part of the server"
    mine = set(shown)
    for index, (what, which, script) in enumerate(then):
        machine.clock.sleep(1.0)
        alive = [one for one in tree if one.alive and one.pid in shown]
        one = alive[which % len(alive)] if alive else None
        pid = 800 + index
        if what == "a child is born" and one:
            machine.add(make(pid, script, machine.clock.now_s, ppid=one.pid, **job))
            mine.add(pid)
        elif what == "a member dies" and one:
            one.dies_at_s = machine.clock.now_s
        elif what == "a pid changes hands" and one and one is not root:
            mine.discard(one.pid)
            strangers.add(one.pid)
            machine.add(make(one.pid, script, machine.clock.now_s, command=one.command, ppid=1))
            tree.remove(one)
        elif what == "a look-alike comes":
            machine.add(make(pid, script, machine.clock.now_s, command=LOOKS[2], sid=SHELL_PID, pgid=ROOT))
            strangers.add(pid)

    # Born of somebody who was dead again before the next look: nobody can know whose it was.
    now = machine.processes()
    orphaned = {pid for pid in mine - shown if pid not in now or now[pid].ppid not in mine}
    before_s = machine.clock.now_s
    targets = targets_of(pinned(machine, trees))
    baseline = take_late_baseline(machine, targets)
    budgets = Budgets(total_s=TOTAL_S, terminate_s=5.0, orphans_s=5.0, kill_s=5.0, gpu_release_s=10.0)
    clearance = clear(machine, targets, baseline, budgets=budgets)

    assert not machine.signalled_pids() & strangers, "a stranger was signalled"
    living = {pid for pid, one in machine.processes().items() if one.alive} & mine
    said = evidence(clearance, "processes").seen
    assert all(f"pid {pid} " in said for pid in living - orphaned), "one of ours survives unreported"
    if clearance.verdict is Verdict.CLEAN:
        assert not living - orphaned
        held_mib = sum(machine._by_pid[pid].holds_mib(GPU, machine.clock.now_s) for pid in mine - orphaned)
        assert held_mib <= 32.0
    assert machine.clock.now_s - before_s <= TOTAL_S + 3.0, "it took longer than it was given"
