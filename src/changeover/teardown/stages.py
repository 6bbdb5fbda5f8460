"""The teardown as a state machine: a pure function of (state, facts, now).

::

    plan -> drain -> terminate -> wait -> kill -> orphans -> holders -> tracker -> verify -> verdict

Every stage ends by proof or by its deadline. ``step`` returns the next state and the actions to take; it
reads no clock and touches no process, so that every path can be tested without either.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from changeover.machine.processes import ProcessIdentity
from changeover.teardown.budgets import Budgets
from changeover.teardown.moves import (
    Action,
    BeginDrain,
    CutDrain,
    Facts,
    KillCgroups,
    ListHolders,
    Member,
    Role,
    Signal,
)

_IDLE_LOOKS = 2  # a gauge of 0 once may be the moment between two requests
_MUTE_LOOKS = 3
_CUT_WAIT_S = 3.0  # for the aborts to be seen by the gauge
_PATIENT_ROUNDS = 3
_QUIET_LOOKS = 2  # a process may fork between our look and its death
_DEAD_WAIT_S = 2.0


class Stage(StrEnum):
    """Where a teardown is."""

    PLAN = "plan"
    DRAIN = "drain"
    TERMINATE = "terminate"
    WAIT = "wait"
    KILL = "kill"
    ORPHANS = "orphans"
    HOLDERS = "holders"
    TRACKER = "tracker"
    VERIFY = "verify"


LEGAL_MOVES: Mapping[Stage, frozenset[Stage]] = {
    Stage.PLAN: frozenset({Stage.DRAIN, Stage.TERMINATE, Stage.ORPHANS}),
    Stage.DRAIN: frozenset({Stage.TERMINATE, Stage.KILL, Stage.ORPHANS}),
    Stage.TERMINATE: frozenset({Stage.WAIT}),
    Stage.WAIT: frozenset({Stage.KILL, Stage.ORPHANS}),
    Stage.KILL: frozenset({Stage.ORPHANS, Stage.HOLDERS}),
    Stage.ORPHANS: frozenset({Stage.KILL, Stage.HOLDERS}),
    Stage.HOLDERS: frozenset({Stage.TRACKER}),
    Stage.TRACKER: frozenset({Stage.VERIFY}),
    Stage.VERIFY: frozenset(),
}


@dataclass(frozen=True)
class State:
    """Where the teardown is and what it remembers. Times are monotonic seconds.

    ``running`` is the last known number of requests, ``cut_s`` when they were cut off; ``kill_rounds`` counts how
    often somebody new had to be killed.
    """

    stage: Stage
    entered_s: float
    deadline_s: float
    end_s: float
    began: bool = False
    good_looks: int = 0
    mute_looks: int = 0
    running: int | None = None
    cut_s: float | None = None
    kill_rounds: int = 0
    terminated: frozenset[ProcessIdentity] = frozenset()
    killed: frozenset[ProcessIdentity] = frozenset()


@dataclass(frozen=True)
class Left:
    """A stage that has ended."""

    stage: Stage
    seconds: float
    outcome: str
    detail: str


@dataclass(frozen=True)
class Step:
    state: State
    actions: tuple[Action, ...] = ()
    left: Left | None = None


def begin(now_s: float, budgets: Budgets, terminated: frozenset[ProcessIdentity] = frozenset()) -> State:
    """``terminated`` got SIGTERM from an earlier teardown that did not come to its end; some take a second one ill."""
    end_s = now_s + budgets.total_s
    return State(Stage.PLAN, entered_s=now_s, deadline_s=now_s, end_s=end_s, terminated=terminated)


def step(state: State, facts: Facts, now_s: float, budgets: Budgets) -> Step:
    """One decision: the caller carries out the actions in order, looks at the machine, and asks again."""
    return _STAGES[state.stage](state, facts, now_s, budgets)


def _plan(state: State, facts: Facts, now_s: float, budgets: Budgets) -> Step:
    leaders = _of(facts, Role.LEADER)
    detail = f"{len(facts.members)} processes of ours"
    if not leaders:
        return _move(state, Stage.ORPHANS, now_s, budgets, "proved", detail + ", no leader alive")
    if facts.can_drain:
        return _move(state, Stage.DRAIN, now_s, budgets, "proved", detail)
    return _move(state, Stage.TERMINATE, now_s, budgets, "proved", detail)


def _drain(state: State, facts: Facts, now_s: float, budgets: Budgets) -> Step:
    """Until nothing runs, by the engine's exact proof or by two looks at its gauge; at the deadline the rest is cut.

    While the gauge falls the deadline moves (as systemd's EXTEND_TIMEOUT_USEC does), up to ``drain_cap_s``.
    """
    if not _of(facts, Role.LEADER):
        return _move(state, Stage.ORPHANS, now_s, budgets, "expired", "the server died while draining")
    if not state.began:
        return Step(replace(state, began=True), (BeginDrain(),))
    if state.cut_s is not None:
        return _after_the_cut(state, facts, now_s, budgets)
    looks = state.good_looks + 1 if facts.running == 0 else 0
    seen = replace(_extended(state, facts, now_s, budgets), good_looks=looks)
    if facts.running is not None:
        seen = replace(seen, running=facts.running)
    if facts.running == 0 and facts.proven_idle:
        return _idle(seen, facts, now_s, budgets, "idle, by the engine's own proof")
    if looks >= _IDLE_LOOKS:
        return _idle(seen, facts, now_s, budgets, f"0 running, {looks} times")
    seen = replace(seen, mute_looks=seen.mute_looks + 1 if facts.mute else 0)
    if seen.mute_looks >= _MUTE_LOOKS:
        detail = "the server does not say what runs: left to its own shutdown"
        return _move(seen, Stage.TERMINATE, now_s, budgets, "expired", detail)
    if now_s >= seen.deadline_s:
        return Step(replace(seen, cut_s=now_s), (CutDrain(),))
    return Step(seen)


def _extended(state: State, facts: Facts, now_s: float, budgets: Budgets) -> State:
    """The deadline moved by half a drain's time where the gauge has fallen since the last look."""
    falls = facts.running is not None and state.running is not None and facts.running < state.running
    if not falls:
        return state
    cap_s = min(state.entered_s + budgets.drain_cap_s, state.end_s - budgets.kept_for_later_s("drain"))
    return replace(state, deadline_s=max(state.deadline_s, min(cap_s, now_s + budgets.drain_s / 2)))


def _idle(state: State, facts: Facts, now_s: float, budgets: Budgets, detail: str) -> Step:
    """A server with nothing to finish needs no courtesy, where its profile says so and nothing speaks against it.

    Never after a SIGTERM: a process that is giving back pinned memory must not be killed in the middle of it.
    """
    workers = _workers(facts)
    if all(member.fast for member in workers) and not state.terminated:
        return _move(state, Stage.KILL, now_s, budgets, "proved", f"{detail}; fast: no SIGTERM")
    return _move(state, Stage.TERMINATE, now_s, budgets, "proved", detail)


def _after_the_cut(state: State, facts: Facts, now_s: float, budgets: Budgets) -> Step:
    """The requests lost are those that ran when the time was up, whatever the gauge says of them later."""
    lost = "unknown" if state.running is None else str(state.running)
    cut_s = state.cut_s if state.cut_s is not None else now_s
    if facts.running == 0 or now_s >= cut_s + min(_CUT_WAIT_S, budgets.kept_for_later_s("drain") / 4):
        return _move(state, Stage.TERMINATE, now_s, budgets, "expired", f"{lost} requests cut off")
    return Step(state)


def _terminate(state: State, facts: Facts, now_s: float, budgets: Budgets) -> Step:
    """Leaders only: engines end their workers themselves, and a worker ended first makes them report a crash.

    SIGCONT as systemd does: SIGTERM stays pending for a stopped process (systemd.kill(5)).
    """
    leaders = tuple(one for one in _of(facts, Role.LEADER) if one.identity not in state.terminated)
    ended = replace(state, terminated=state.terminated | {leader.identity for leader in leaders})
    actions = tuple(one for leader in leaders for one in _terminate_orders(leader))
    moved = _move(ended, Stage.WAIT, now_s, budgets, "proved", f"SIGTERM to {len(leaders)}")
    return replace(moved, actions=actions)


def _wait(state: State, facts: Facts, now_s: float, budgets: Budgets) -> Step:
    if not _of(facts, Role.LEADER):
        left = len(_workers(facts))
        return _move(state, Stage.ORPHANS, now_s, budgets, "proved", f"leaders gone, {left} others left")
    if now_s >= state.deadline_s:
        return _move(state, Stage.KILL, now_s, budgets, "expired", f"{len(_workers(facts))} still alive")
    return Step(state)


def _kill(state: State, facts: Facts, now_s: float, budgets: Budgets) -> Step:
    """Again until nobody new appears (systemd's cg_kill); each process once: a second SIGKILL does nothing
    more.
    """
    workers = _workers(facts)
    if not workers:
        if state.good_looks + 1 >= _QUIET_LOOKS:
            return _move(
                state, Stage.ORPHANS, now_s, budgets, "proved", f"{len(state.killed)} killed, none left"
            )
        return Step(replace(state, good_looks=state.good_looks + 1))
    if state.began and now_s >= state.deadline_s:  # however late it is, everybody gets one SIGKILL
        detail = f"{len(workers)} survive SIGKILL"
        return _move(state, Stage.HOLDERS, now_s, budgets, "expired", detail)
    spare_dumping = (
        now_s < state.entered_s + budgets.core_dump_s
    )  # one thread killed cuts the core off (Slurm)
    due = tuple(
        member
        for member in workers
        if member.identity not in state.killed and not (member.dumping_core and spare_dumping)
    )
    killed = state.killed | {member.identity for member in due}
    orders: tuple[Action, ...] = tuple(Signal(one.identity, signal.SIGKILL, one.proof) for one in due)
    rounds = state.kill_rounds + bool(due)
    if due and rounds > _PATIENT_ROUNDS:  # it forks faster than we look: the kernel can do it at once
        orders += (KillCgroups(),)
    return Step(replace(state, began=True, killed=killed, kill_rounds=rounds, good_looks=0), orders)


def _orphans(state: State, facts: Facts, now_s: float, budgets: Budgets) -> Step:
    """Those whose leader is gone: SIGTERM each, once; whoever is left at the deadline goes to ``kill``."""
    workers = _workers(facts)
    if not workers:
        if state.good_looks + 1 >= _QUIET_LOOKS:
            ended = len(state.terminated | state.killed)
            return _move(
                state, Stage.HOLDERS, now_s, budgets, "proved", f"none left, {ended} signalled in all"
            )
        return Step(replace(state, good_looks=state.good_looks + 1))
    if state.killed or now_s >= state.deadline_s:
        return _move(state, Stage.KILL, now_s, budgets, "expired", f"{len(workers)} still alive")
    due = tuple(member for member in workers if member.identity not in state.terminated)
    ended_now = state.terminated | {member.identity for member in due}
    orders = tuple(one for member in due for one in _terminate_orders(member))
    return Step(replace(state, terminated=ended_now, good_looks=0), orders)


def _holders(state: State, facts: Facts, now_s: float, budgets: Budgets) -> Step:
    """Holding a device is no proof: the holders are listed for the record, and nobody is signalled for it."""
    if not state.began:
        return Step(replace(state, began=True), (ListHolders(),))
    return _move(state, Stage.TRACKER, now_s, budgets, "proved", "holders of the devices listed")


def _tracker(state: State, facts: Facts, now_s: float, budgets: Budgets) -> Step:
    """The tracker ignores SIGTERM and unlinks when its pipe closes: it gets time, then SIGKILL."""
    trackers = _of(facts, Role.TRACKER)
    if not trackers and facts.populated and not state.began:
        return Step(
            replace(state, began=True), (KillCgroups(),)
        )  # what lives there is ours, though we see nobody
    if not trackers:
        return _move(state, Stage.VERIFY, now_s, budgets, "proved", "no resource tracker left")
    if now_s < state.deadline_s:
        return Step(state)
    give_up_s = min(
        state.deadline_s + _DEAD_WAIT_S, state.end_s - budgets.kept_for_later_s(Stage.TRACKER.value) / 2
    )
    if state.began and now_s >= give_up_s:
        return _move(
            state, Stage.VERIFY, now_s, budgets, "expired", f"{len(trackers)} trackers survive SIGKILL"
        )
    due = tuple(member for member in trackers if member.identity not in state.killed)
    killed = state.killed | {member.identity for member in due}
    orders = tuple(Signal(member.identity, signal.SIGKILL, member.proof) for member in due)
    return Step(replace(state, began=True, killed=killed), orders)


def _verify(state: State, facts: Facts, now_s: float, budgets: Budgets) -> Step:
    return Step(state)


_STAGES: Mapping[Stage, Callable[[State, Facts, float, Budgets], Step]] = {
    Stage.PLAN: _plan,
    Stage.DRAIN: _drain,
    Stage.TERMINATE: _terminate,
    Stage.WAIT: _wait,
    Stage.KILL: _kill,
    Stage.ORPHANS: _orphans,
    Stage.HOLDERS: _holders,
    Stage.TRACKER: _tracker,
    Stage.VERIFY: _verify,
}


def _move(state: State, to: Stage, now_s: float, budgets: Budgets, outcome: str, detail: str) -> Step:
    if to not in LEGAL_MOVES[state.stage]:
        raise AssertionError(f"illegal move {state.stage} -> {to}")
    left = Left(state.stage, now_s - state.entered_s, outcome, detail)
    deadline = min(now_s + _budget_s(to, budgets), state.end_s - budgets.kept_for_later_s(to.value))
    entered = replace(state, stage=to, entered_s=now_s, deadline_s=deadline, began=False, good_looks=0)
    return Step(entered, left=left)


def _budget_s(stage: Stage, budgets: Budgets) -> float:
    return {
        Stage.DRAIN: budgets.drain_s,
        Stage.WAIT: budgets.terminate_s,
        Stage.KILL: budgets.kill_s,
        Stage.ORPHANS: budgets.orphans_s,
        Stage.TRACKER: budgets.tracker_s,
        Stage.VERIFY: budgets.total_s,
    }.get(stage, 0.0)


def _of(facts: Facts, role: Role) -> tuple[Member, ...]:
    return tuple(member for member in facts.members if member.role is role)


def _workers(facts: Facts) -> tuple[Member, ...]:
    """Leaders first: a supervisor that sees its child die before it would start another."""
    others = (member for member in facts.members if member.role is not Role.TRACKER)
    return tuple(
        sorted(others, key=lambda member: (member.role is not Role.LEADER, member.identity.start_ticks))
    )


def _terminate_orders(member: Member) -> tuple[Signal, Signal]:
    return (
        Signal(member.identity, signal.SIGTERM, member.proof),
        Signal(member.identity, signal.SIGCONT, member.proof),
    )
