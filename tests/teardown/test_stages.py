"""The state machine alone: facts and a clock in, decisions out."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from changeover.machine.processes import ProcessIdentity
from changeover.teardown.budgets import Budgets
from changeover.teardown.moves import (
    BeginDrain,
    CutDrain,
    Facts,
    KillCgroups,
    ListHolders,
    Member,
    Role,
    Signal,
)
from changeover.teardown.ownership import Proof
from changeover.teardown.stages import LEGAL_MOVES, Stage, State, begin, step

BUDGETS = Budgets()


def member(pid: int, role: Role = Role.MEMBER, *, dumping_core: bool = False) -> Member:
    return Member(ProcessIdentity(pid, pid, "boot"), role, Proof.SESSION, dumping_core)


LEADER, WORKER, TRACKER = member(10, Role.LEADER), member(11), member(12, Role.TRACKER)


def at(stage: Stage, *, deadline_s: float = 50.0, **more: object) -> State:
    return State(stage, entered_s=0.0, deadline_s=deadline_s, end_s=600.0, **more)  # type: ignore[arg-type]


def signals(actions: tuple[object, ...]) -> list[tuple[int, str]]:
    return [(one.identity.pid, one.number.name) for one in actions if isinstance(one, Signal)]


def test_plan_goes_to_drain_where_the_engine_can() -> None:
    assert (
        step(begin(0.0, BUDGETS), Facts((LEADER,), can_drain=True), 0.0, BUDGETS).state.stage is Stage.DRAIN
    )
    assert step(begin(0.0, BUDGETS), Facts((LEADER,)), 0.0, BUDGETS).state.stage is Stage.TERMINATE


def test_plan_without_a_leader_goes_to_the_orphans() -> None:
    assert (
        step(begin(0.0, BUDGETS), Facts((WORKER,), can_drain=True), 0.0, BUDGETS).state.stage is Stage.ORPHANS
    )


def test_drain_needs_two_looks_at_zero() -> None:
    begun = step(at(Stage.DRAIN), Facts((LEADER,)), 0.0, BUDGETS)
    assert begun.actions == (BeginDrain(),)
    once = step(begun.state, Facts((LEADER,), running=0), 1.0, BUDGETS)
    assert once.state.stage is Stage.DRAIN
    busy = step(once.state, Facts((LEADER,), running=3), 2.0, BUDGETS)
    again = step(busy.state, Facts((LEADER,), running=0), 3.0, BUDGETS)
    assert again.state.stage is Stage.DRAIN
    assert step(again.state, Facts((LEADER,), running=0), 4.0, BUDGETS).state.stage is Stage.TERMINATE


def test_drain_at_its_deadline_is_cut_once_and_remembers_what_was_running() -> None:
    state = at(Stage.DRAIN, began=True, running=7)
    cut = step(state, Facts((LEADER,), running=None), 50.0, BUDGETS)
    assert cut.actions == (CutDrain(),) and cut.state.stage is Stage.DRAIN
    waiting = step(cut.state, Facts((LEADER,), running=2), 51.0, BUDGETS)
    assert waiting.actions == () and waiting.state.stage is Stage.DRAIN
    for facts, now_s in ((Facts((LEADER,), running=0), 51.5), (Facts((LEADER,), running=2), 53.0)):
        gone_on = step(waiting.state, facts, now_s, BUDGETS)
        assert gone_on.state.stage is Stage.TERMINATE and gone_on.state.running == 7
        assert gone_on.left is not None and gone_on.left.detail == "7 requests cut off"


def test_drain_lasts_longer_while_requests_end_but_not_for_ever() -> None:
    budgets = Budgets(drain_s=50.0, drain_cap_s=80.0)
    state = at(Stage.DRAIN, began=True, running=7)
    fallen = step(state, Facts((LEADER,), running=6), 49.0, budgets).state
    assert fallen.deadline_s == 74.0
    assert step(fallen, Facts((LEADER,), running=6), 60.0, budgets).state.deadline_s == 74.0, (
        "no fall, no more"
    )
    assert step(fallen, Facts((LEADER,), running=5), 70.0, budgets).state.deadline_s == 80.0
    assert step(state, Facts((LEADER,), running=9), 49.0, budgets).state.deadline_s == 50.0


def test_a_server_that_does_not_say_is_not_waited_for() -> None:
    state, mute = at(Stage.DRAIN, began=True), Facts((LEADER,), mute=True)
    for _ in range(2):
        state = step(state, mute, 1.0, BUDGETS).state
        assert state.stage is Stage.DRAIN
    assert step(state, Facts((LEADER,), running=3), 1.0, BUDGETS).state.mute_looks == 0
    gone_on = step(state, mute, 1.0, BUDGETS)
    assert gone_on.state.stage is Stage.TERMINATE and gone_on.left is not None
    assert gone_on.left.outcome == "expired" and "does not say" in gone_on.left.detail


def test_an_exact_proof_of_idleness_needs_one_look() -> None:
    state = at(Stage.DRAIN, began=True)
    assert step(state, Facts((LEADER,), running=0), 1.0, BUDGETS).state.stage is Stage.DRAIN
    proven = step(state, Facts((LEADER,), running=0, proven_idle=True), 1.0, BUDGETS)
    assert proven.state.stage is Stage.TERMINATE
    busy = step(state, Facts((LEADER,), running=1, proven_idle=True), 1.0, BUDGETS)
    assert busy.state.stage is Stage.DRAIN, "a gauge that says otherwise is believed"


FAST = tuple(replace(one, fast=True) for one in (LEADER, WORKER))


def test_the_fast_lane_kills_an_idle_server_leader_first_and_spares_the_tracker() -> None:
    idle = Facts((WORKER, *FAST[::-1], TRACKER), running=0, proven_idle=True)
    state = at(Stage.DRAIN, began=True)
    assert step(state, idle, 1.0, BUDGETS).state.stage is Stage.TERMINATE, "one member may not be"
    fast = step(state, replace(idle, members=(*FAST[::-1], TRACKER)), 1.0, BUDGETS)
    assert fast.state.stage is Stage.KILL and fast.left is not None and "fast" in fast.left.detail
    killed = step(fast.state, replace(idle, members=(*FAST[::-1], TRACKER)), 1.0, BUDGETS)
    assert signals(killed.actions) == [(10, "SIGKILL"), (11, "SIGKILL")]


def test_the_fast_lane_is_for_the_idle_and_for_those_that_nobody_has_asked_to_end() -> None:
    asked = at(Stage.DRAIN, began=True, terminated=frozenset({WORKER.identity}))
    idle = Facts(FAST, running=0, proven_idle=True)
    assert step(asked, idle, 1.0, BUDGETS).state.stage is Stage.TERMINATE, (
        "it may be giving back pinned memory"
    )
    late = at(Stage.DRAIN, began=True, running=2, cut_s=50.0)
    assert step(late, Facts(FAST, running=0), 51.0, BUDGETS).state.stage is Stage.TERMINATE


def test_who_got_sigterm_from_an_earlier_teardown_gets_no_second_one() -> None:
    state = begin(0.0, BUDGETS, frozenset({LEADER.identity}))
    terminating = step(state, Facts((LEADER, WORKER)), 0.0, BUDGETS).state
    waiting = step(terminating, Facts((LEADER, WORKER)), 0.0, BUDGETS)
    assert waiting.actions == () and waiting.state.stage is Stage.WAIT


def test_a_forest_that_forks_faster_than_we_look_is_left_to_the_kernel() -> None:
    state, ordered = at(Stage.KILL), []
    for round_number in range(6):
        done = step(state, Facts((member(100 + round_number),)), float(round_number), BUDGETS)
        ordered.append(KillCgroups() in done.actions)
        state = done.state
    assert ordered == [False, False, False, True, True, True]


def test_what_lives_in_our_cgroup_unseen_is_killed_with_it() -> None:
    state = at(Stage.TRACKER)
    killed = step(state, Facts((), populated=True), 1.0, BUDGETS)
    assert killed.actions == (KillCgroups(),)
    assert step(killed.state, Facts((), populated=True), 1.1, BUDGETS).state.stage is Stage.VERIFY
    assert step(state, Facts(()), 1.0, BUDGETS).actions == ()


def test_drain_ends_when_the_server_dies() -> None:
    assert step(at(Stage.DRAIN, began=True), Facts((WORKER,)), 1.0, BUDGETS).state.stage is Stage.ORPHANS


def test_terminate_signals_the_leader_only_and_wakes_it() -> None:
    moved = step(at(Stage.TERMINATE), Facts((LEADER, WORKER, TRACKER)), 0.0, BUDGETS)
    assert signals(moved.actions) == [(10, "SIGTERM"), (10, "SIGCONT")]
    assert moved.state.stage is Stage.WAIT


def test_wait_ends_when_the_leader_is_gone_or_the_time_is_up() -> None:
    assert step(at(Stage.WAIT), Facts((LEADER, WORKER)), 49.0, BUDGETS).state.stage is Stage.WAIT
    assert step(at(Stage.WAIT), Facts((WORKER,)), 1.0, BUDGETS).state.stage is Stage.ORPHANS
    assert step(at(Stage.WAIT), Facts((LEADER,)), 50.0, BUDGETS).state.stage is Stage.KILL


def test_kill_takes_each_once_leaders_first_and_spares_the_tracker() -> None:
    first = step(at(Stage.KILL), Facts((WORKER, LEADER, TRACKER)), 0.0, BUDGETS)
    assert signals(first.actions) == [(10, "SIGKILL"), (11, "SIGKILL")]
    assert signals(step(first.state, Facts((WORKER, LEADER)), 1.0, BUDGETS).actions) == []


def test_kill_goes_on_until_nobody_new_appears() -> None:
    first = step(at(Stage.KILL), Facts((WORKER,)), 0.0, BUDGETS)
    none = step(first.state, Facts(()), 0.1, BUDGETS)
    assert none.state.stage is Stage.KILL
    newcomer = step(none.state, Facts((member(13),)), 0.2, BUDGETS)
    assert signals(newcomer.actions) == [(13, "SIGKILL")]
    quiet = step(step(newcomer.state, Facts(()), 0.3, BUDGETS).state, Facts(()), 0.4, BUDGETS)
    assert quiet.state.stage is Stage.ORPHANS


def test_kill_entered_too_late_still_kills_once() -> None:
    late = step(at(Stage.KILL, deadline_s=-1.0), Facts((WORKER,)), 5.0, BUDGETS)
    assert signals(late.actions) == [(11, "SIGKILL")]
    assert step(late.state, Facts((WORKER,)), 5.1, BUDGETS).state.stage is Stage.HOLDERS


def test_a_core_dump_is_not_cut_off_until_its_time_is_up() -> None:
    dumping = member(11, dumping_core=True)
    spared = step(at(Stage.KILL, deadline_s=500.0), Facts((dumping,)), 0.0, BUDGETS)
    assert signals(spared.actions) == []
    late = step(spared.state, Facts((dumping,)), BUDGETS.core_dump_s, BUDGETS)
    assert signals(late.actions) == [(11, "SIGKILL")]


def test_a_process_that_dumps_no_core_is_killed_at_once() -> None:
    assert signals(step(at(Stage.KILL), Facts((member(11),)), 0.0, BUDGETS).actions) == [(11, "SIGKILL")]


def test_orphans_get_sigterm_once_and_then_the_kill() -> None:
    first = step(at(Stage.ORPHANS), Facts((WORKER, TRACKER)), 0.0, BUDGETS)
    assert signals(first.actions) == [(11, "SIGTERM"), (11, "SIGCONT")]
    assert step(first.state, Facts((WORKER,)), 1.0, BUDGETS).actions == ()
    assert step(first.state, Facts((WORKER,)), 50.0, BUDGETS).state.stage is Stage.KILL


def test_holders_are_listed_and_nobody_is_signalled_for_holding() -> None:
    listing = step(at(Stage.HOLDERS), Facts((TRACKER,)), 0.0, BUDGETS)
    assert listing.actions == (ListHolders(),)
    assert step(listing.state, Facts((TRACKER,)), 0.0, BUDGETS).state.stage is Stage.TRACKER


def test_the_tracker_gets_its_second_then_sigkill_then_no_more_patience() -> None:
    state = at(Stage.TRACKER, deadline_s=1.0)
    assert step(state, Facts((TRACKER,)), 0.9, BUDGETS).actions == ()
    assert step(state, Facts(()), 0.1, BUDGETS).state.stage is Stage.VERIFY
    killed = step(state, Facts((TRACKER,)), 1.0, BUDGETS)
    assert signals(killed.actions) == [(12, "SIGKILL")]
    assert step(killed.state, Facts((TRACKER,)), 3.0, BUDGETS).state.stage is Stage.VERIFY


def test_sigquit_is_no_stage() -> None:
    """SGLang's parent answers SIGQUIT with SIGKILL for the whole tree: it is its hardest end, not a softer
    one.
    """
    assert signal.SIGQUIT.name not in {name for _, name in signals(_everything_ever_sent())}


def _everything_ever_sent() -> tuple[object, ...]:
    sent: list[object] = []
    for stage in Stage:
        for now_s in (0.0, 1.0, 50.0, 599.0):
            sent.extend(
                step(at(stage, deadline_s=10.0), Facts((LEADER, WORKER, TRACKER)), now_s, BUDGETS).actions
            )
    return tuple(sent)


looks = st.lists(
    st.tuples(
        st.lists(
            st.sampled_from([LEADER, WORKER, TRACKER, member(13), member(14, dumping_core=True)]), unique=True
        ),
        st.sampled_from([None, 0, 1]),
        st.floats(0.0, 30.0),
    ),
    min_size=1,
    max_size=60,
)


@given(looks=looks, total_s=st.floats(1.0, 900.0), can_drain=st.booleans())
def test_every_walk_uses_legal_moves_only_and_signals_only_whom_it_was_shown(
    looks: list[tuple[list[Member], int | None, float]], total_s: float, can_drain: bool
) -> None:
    budgets = Budgets(total_s=total_s)
    state, now_s = begin(0.0, budgets), 0.0
    for members, running, seconds in looks:
        facts = Facts(tuple(members), can_drain=can_drain, running=running)
        taken = step(state, facts, now_s, budgets)
        if taken.state.stage is not state.stage:
            assert taken.state.stage in LEGAL_MOVES[state.stage]
            assert taken.left is not None and taken.left.stage is state.stage
        shown = {one.identity for one in members}
        assert {one.identity for one in taken.actions if isinstance(one, Signal)} <= shown
        assert taken.state.deadline_s <= taken.state.end_s == budgets.total_s
        state, now_s = taken.state, now_s + seconds


@given(
    members=st.lists(st.sampled_from([LEADER, WORKER, TRACKER]), unique=True), total_s=st.floats(0.5, 900.0)
)
def test_whatever_refuses_to_die_the_stages_reach_verify_within_the_total(
    members: list[Member], total_s: float
) -> None:
    """The machine never changes: nobody dies, nothing drains. It must still come to an end, in time to
    verify.
    """
    budgets = Budgets(total_s=total_s)
    state, now_s, tick_s = begin(0.0, budgets), 0.0, total_s / 400
    facts = Facts(tuple(members), can_drain=True, running=5)
    while state.stage is not Stage.VERIFY:
        assert now_s <= total_s
        state = step(state, facts, now_s, budgets).state
        now_s += tick_s


@pytest.mark.parametrize("total_s", [1.0, 5.0, 20.0, 600.0])
def test_what_is_kept_for_later_stages_never_exceeds_the_total_and_shrinks_along_the_way(
    total_s: float,
) -> None:
    budgets = Budgets(total_s=total_s)
    kept = [budgets.kept_for_later_s(stage) for stage in ("drain", "wait", "orphans", "kill", "tracker")]
    assert kept == sorted(kept, reverse=True)
    assert all(0 < seconds < total_s for seconds in kept)
