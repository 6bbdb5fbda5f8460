"""Who is never signalled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from changeover.machine.processes import ProcessFacts, ProcessIdentity
from changeover.teardown.guard import forbidden, sparing_only_ourselves, untouchable


def process(pid: int, ppid: int, *, sid: int = 0, pgid: int = 0, comm: str = "x") -> ProcessFacts:
    sid = sid or pid
    identity = ProcessIdentity(pid, 1, "boot")
    return ProcessFacts(identity, ppid, pgid or sid, sid, "S", comm, 0, 0, 0, rss_mib=1.0, living_tasks=1)


WORLD = {
    one.pid: one
    for one in (
        process(1, 0),
        process(40, 1, comm="sshd"),
        process(50, 40, comm="bash"),
        process(60, 50, sid=50, pgid=60, comm="changeover"),
        process(70, 60, comm="server"),
    )
}
OURS = untouchable(60, WORLD)


def test_ancestors_up_to_init() -> None:
    assert OURS.ancestors == {50, 40, 1} and (OURS.sid, OURS.pgid) == (50, 60)


@pytest.mark.parametrize("pid", [1, 40, 50, 60])
def test_ourselves_and_what_we_hang_on(pid: int) -> None:
    assert forbidden(WORLD[pid], OURS)


def test_a_server_of_ours_may_be_signalled() -> None:
    assert forbidden(WORLD[70], OURS) is None


def test_our_session_and_our_group() -> None:
    assert forbidden(process(80, 1, sid=50, pgid=80), OURS)
    assert forbidden(process(80, 1, sid=80, pgid=60), OURS)


def test_sshd_whatever_it_calls_itself() -> None:
    assert forbidden(process(80, 1, comm="sshd-session"), OURS)


def test_mps_itself_has_other_peoples_clients() -> None:
    assert forbidden(process(80, 1, sid=80, pgid=80, comm="nvidia-cuda-mps"), OURS)


def test_who_is_adopted_may_share_our_shell_but_never_be_ourselves_or_above_us() -> None:
    spared = sparing_only_ourselves(OURS)
    assert forbidden(process(80, 1, sid=50, pgid=60), spared) is None
    assert all(forbidden(WORLD[pid], spared) for pid in (1, 40, 50, 60))


@given(pid=st.integers(-5, 100), ppid=st.integers(0, 100), sid=st.integers(0, 100))
def test_flux_core_5791_pid_zero_and_below_are_refused(pid: int, ppid: int, sid: int) -> None:
    """flux-framework/flux-core #5791: kill(getppid()) with a parent outside the namespace is kill(0)."""
    if pid <= 1 or pid in (40, 50, 60):
        assert forbidden(process(pid, ppid, sid=sid), OURS)


def test_flux_core_5791_a_parent_outside_the_namespace_ends_the_chain() -> None:
    alone = untouchable(60, {60: process(60, 0)})
    assert alone.ancestors == frozenset()
    assert forbidden(process(0, 0), alone)
