"""Who is ours: proven by one of these facts, never guessed.

Name, title, port, user, GPU use and a pid in a file are no proof. Everything here is a function of facts;
nothing is read and nothing is sent.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from changeover.machine.processes import ProcessFacts, ProcessIdentity
from changeover.teardown.footprint import Target


class Proof(StrEnum):
    """Why a process is ours; the text goes into the record."""

    FORKED = "forked by us and held since"
    RECORDED = "recorded earlier as ours, with the same start time"
    SESSION = "in the session that we made, and younger than its leader"
    COOKIE = "carries this run's secret in its environment"
    DESCENDANT = "descends from a process of ours"
    CAME_HOME = "orphan of our only tree, handed to us as subreaper"
    CGROUP = "in our cgroup"
    ADOPTED = "adopted by the user's word"


@dataclass(frozen=True)
class Sight:
    """One process as the prover sees it. ``cookie`` is what its environment carries, if anything.

    ``spawned``: this very process started it and has held it since. ``came_home``: it was orphaned and
    handed to us as subreaper, and no other tree that we started could have been its origin.
    """

    process: ProcessFacts
    cookie: str | None = None
    spawned: bool = False
    came_home: bool = False


def session_is_continuous(target: Target, processes: Mapping[int, ProcessFacts]) -> bool:
    """Whether the session number still means the session that we made.

    The kernel gives a pid out again only when no process has it as pid, group or session any more. So the
    number is ours for as long as somebody known has kept it: the leader (alive or unreaped), or a recorded
    member that is still in that session. Otherwise a stranger may have got the number, and made a session
    of it.
    """
    if target.leader is None or target.sid is None:
        return False
    known = (target.leader, *target.members)
    return any(
        found is not None and found.identity == identity and found.sid == target.sid
        for identity in known
        for found in (processes.get(identity.pid),)
    )


def prove(sight: Sight, target: Target, *, continuous_session: bool, in_cgroup: bool = False) -> Proof | None:
    """The strongest proof that this process belongs to the target, or None.

    Nothing that started before the target's leader can be the leader's work, whatever else is said of it.
    """
    identity = sight.process.identity
    if identity in target.adopted:
        return Proof.ADOPTED
    if identity == target.leader and sight.spawned:
        return Proof.FORKED
    if identity == target.leader or identity in target.members:
        return Proof.RECORDED
    if target.leader is not None and not _younger(identity, target.leader):
        return None
    if in_cgroup:
        return Proof.CGROUP
    if continuous_session and sight.process.sid == target.sid:
        return Proof.SESSION
    if sight.cookie is not None and hmac.compare_digest(sight.cookie.encode(), target.cookie.encode()):
        return Proof.COOKIE
    if sight.came_home:
        return Proof.CAME_HOME
    return None


def prove_all(
    sights: Mapping[int, Sight], target: Target, cgroup_members: frozenset[int] = frozenset()
) -> dict[ProcessIdentity, Proof]:
    """Everybody who belongs to the target: by a proof of his own, or as a descendant of one who has it.

    ``cgroup_members`` are the pids in the target's cgroup, read after the sights: whoever has one of them was there.

    Descent counts only along living parents seen in the same look: a pid named as parent is that parent
    then. What carries another run's secret is that run's, with everything below it, even if it hangs below
    one of ours.
    """
    eligible = {
        pid: sight for pid, sight in sights.items() if sight.spawned or not of_another_run(sight, target)
    }
    continuous = session_is_continuous(target, {pid: sight.process for pid, sight in sights.items()})
    proven: dict[ProcessIdentity, Proof] = {}
    children: dict[int, list[ProcessFacts]] = {}
    for sight in eligible.values():
        children.setdefault(sight.process.ppid, []).append(sight.process)
        inside = sight.process.pid in cgroup_members
        proof = prove(sight, target, continuous_session=continuous, in_cgroup=inside)
        if proof is not None:
            proven[sight.process.identity] = proof
    waiting = [identity.pid for identity in proven]
    while waiting:
        for child in children.get(waiting.pop(), []):
            older = target.leader is not None and not _younger(child.identity, target.leader)
            if child.identity not in proven and not older:
                proven[child.identity] = Proof.DESCENDANT
                waiting.append(child.pid)
    return proven


def of_another_run(sight: Sight, target: Target) -> bool:
    """Whether the process carries a secret, and not this run's."""
    return sight.cookie is not None and not hmac.compare_digest(sight.cookie.encode(), target.cookie.encode())


def _younger(identity: ProcessIdentity, leader: ProcessIdentity) -> bool:
    return identity.boot_id == leader.boot_id and identity.start_ticks >= leader.start_ticks
