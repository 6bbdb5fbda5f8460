"""Each proof, and its twin without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from changeover.machine.processes import ProcessFacts, ProcessIdentity
from changeover.teardown.footprint import Target
from changeover.teardown.ownership import Proof, Sight, prove_all, session_is_continuous

BOOT = "boot"
LEADER = ProcessIdentity(1000, 500, BOOT)
TARGET = Target("server", cookie="ours", leader=LEADER, sid=1000, members=frozenset({LEADER}))


def process(
    pid: int, *, ppid: int = 1, sid: int = 7, start_ticks: int = 600, comm: str = "x"
) -> ProcessFacts:
    return ProcessFacts(
        ProcessIdentity(pid, start_ticks, BOOT),
        ppid,
        sid,
        sid,
        "S",
        comm,
        0,
        0,
        0,
        rss_mib=1.0,
        living_tasks=1,
    )


LEADER_ALIVE = Sight(process(1000, sid=1000, start_ticks=500))


def proofs(*sights: Sight, target: Target = TARGET) -> dict[int, Proof]:
    found = prove_all({sight.process.pid: sight for sight in sights}, target)
    return {identity.pid: proof for identity, proof in found.items()}


def test_forked_by_us_and_held() -> None:
    assert proofs(replace(LEADER_ALIVE, spawned=True)) == {1000: Proof.FORKED}


def test_not_held_the_leader_is_ours_by_the_record_only() -> None:
    assert proofs(LEADER_ALIVE) == {1000: Proof.RECORDED}


def test_session_while_somebody_known_keeps_its_number() -> None:
    assert proofs(LEADER_ALIVE, Sight(process(1001, sid=1000)))[1001] is Proof.SESSION


def test_session_number_that_nobody_known_has_kept_is_no_proof() -> None:
    """The leader was reaped, its number given out again, and a stranger made a session of it."""
    stranger = Sight(process(1000, sid=1000, start_ticks=900))
    assert proofs(stranger, Sight(process(1001, sid=1000, start_ticks=901))) == {}


def test_session_kept_by_a_recorded_member_after_the_leaders_death() -> None:
    member = process(1001, sid=1000)
    target = replace(TARGET, members=TARGET.members | {member.identity})
    assert proofs(Sight(member), Sight(process(1002, sid=1000)), target=target)[1002] is Proof.SESSION


def test_older_than_the_leader_is_never_ours() -> None:
    older = process(1001, sid=1000, start_ticks=499)
    assert 1001 not in proofs(LEADER_ALIVE, Sight(older, cookie="ours", came_home=True))


def test_cookie() -> None:
    assert proofs(Sight(process(2000), cookie="ours")) == {2000: Proof.COOKIE}


@pytest.mark.parametrize("cookie", [None, "", "theirs", "ours "])
def test_without_the_cookie(cookie: str | None) -> None:
    assert proofs(Sight(process(2000), cookie=cookie)) == {}


def test_cookie_from_another_boot_is_no_proof() -> None:
    before = replace(TARGET, leader=ProcessIdentity(1000, 500, "earlier boot"))
    assert proofs(Sight(process(2000), cookie="ours"), target=before) == {}


def test_cookie_alone_proves_where_the_start_was_never_written_down() -> None:
    unwritten = replace(TARGET, leader=None, sid=None, members=frozenset())
    assert proofs(Sight(process(2000), cookie="ours"), Sight(process(2001, sid=1000)), target=unwritten) == {
        2000: Proof.COOKIE
    }


def test_recorded_as_a_descendant_with_the_same_start_time() -> None:
    seen = process(3000)
    assert proofs(Sight(seen), target=replace(TARGET, members=frozenset({seen.identity}))) == {
        3000: Proof.RECORDED
    }


def test_recorded_pid_with_another_start_time_or_boot() -> None:
    for other in (ProcessIdentity(3000, 599, BOOT), ProcessIdentity(3000, 600, "earlier boot")):
        assert proofs(Sight(process(3000)), target=replace(TARGET, members=frozenset({other}))) == {}


def test_descendant_through_a_process_that_has_left_the_session() -> None:
    below = (Sight(process(4000, ppid=1000)), Sight(process(4001, ppid=4000)))
    assert proofs(LEADER_ALIVE, *below) == {
        1000: Proof.RECORDED,
        4000: Proof.DESCENDANT,
        4001: Proof.DESCENDANT,
    }


def test_sibling_of_the_leader_is_no_descendant() -> None:
    assert 4000 not in proofs(LEADER_ALIVE, Sight(process(4000, ppid=1)))


def test_orphan_handed_to_us() -> None:
    assert proofs(Sight(process(5000), came_home=True)) == {5000: Proof.CAME_HOME}
    assert proofs(Sight(process(5000))) == {}


def test_another_runs_process_below_ours_is_that_runs() -> None:
    nested = Sight(process(6000, ppid=1000, sid=1000), cookie="another run")
    below_it = Sight(process(6001, ppid=6000))
    assert set(proofs(LEADER_ALIVE, nested, below_it)) == {1000}


def test_name_title_and_user_are_no_proof() -> None:
    lookalike = Sight(process(7000, comm="sglang::schedul"))
    assert 7000 not in proofs(LEADER_ALIVE, lookalike)


def test_continuity_needs_the_same_start_time() -> None:
    assert session_is_continuous(TARGET, {1000: LEADER_ALIVE.process})
    assert not session_is_continuous(TARGET, {1000: process(1000, sid=1000, start_ticks=501)})
    assert not session_is_continuous(TARGET, {})


sights = st.lists(
    st.builds(
        lambda pid, ppid, sid, ticks, cookie: Sight(
            process(pid, ppid=ppid, sid=sid, start_ticks=ticks), cookie=cookie
        ),
        st.integers(2, 30),
        st.integers(0, 30),
        st.integers(1, 30),
        st.integers(1, 20),
        st.sampled_from([None, "ours", "theirs"]),
    ),
    max_size=25,
    unique_by=lambda sight: sight.process.pid,
)


@given(sights=sights)
def test_nobody_is_ours_without_one_of_the_five_facts(sights: list[Sight]) -> None:
    leader = ProcessIdentity(10, 10, BOOT)
    target = Target("t", cookie="ours", leader=leader, sid=10, members=frozenset({leader}))
    shown = {sight.process.pid: sight for sight in sights}
    proven = prove_all(shown, target)
    for identity, proof in proven.items():
        sight = shown[identity.pid]
        match proof:
            case Proof.RECORDED:
                assert identity == leader
            case Proof.SESSION:
                assert (
                    sight.process.sid == 10
                    and identity.start_ticks >= 10
                    and shown[10].process.identity == leader
                )
            case Proof.COOKIE:
                assert sight.cookie == "ours" and identity.start_ticks >= 10
            case Proof.DESCENDANT:
                assert sight.process.ppid in {one.pid for one in proven}
            case _:
                raise AssertionError(proof)
        assert sight.cookie != "theirs"
