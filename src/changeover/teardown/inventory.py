"""One look at a machine for what belongs to the targets: who, by which proof, and who is left alone and
why.
"""

from __future__ import annotations

import pwd
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from changeover.machine.processes import TICKS_PER_S, ProcessFacts, ProcessIdentity, redacted
from changeover.machine.protocol import Machine
from changeover.machine.shm import Segment
from changeover.teardown.clearance import Refusal
from changeover.teardown.footprint import Target
from changeover.teardown.guard import forbidden, untouchable
from changeover.teardown.moves import Role
from changeover.teardown.ownership import Proof, Sight, of_another_run, prove_all

_TRACKER_MODULE = "multiprocessing.resource_tracker"


@dataclass(frozen=True)
class Found:
    """A process of ours, dead or alive. ``refusal`` says why it must not be signalled; empty if it may be."""

    process: ProcessFacts
    target: str
    proof: Proof
    role: Role
    refusal: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "pid": self.process.pid,
            "start_ticks": self.process.identity.start_ticks,
            "comm": self.process.comm,
            "state": self.process.state,
            "rss_mib": round(self.process.rss_mib, 1),
            "target": self.target,
            "role": self.role.value,
            "proof": self.proof.value,
            "refusal": self.refusal,
        }


@dataclass(frozen=True)
class Inventory:
    """``targets`` are those that were given, with the members seen now added."""

    found: tuple[Found, ...]
    refusals: tuple[Refusal, ...]
    targets: tuple[Target, ...]
    processes: Mapping[int, ProcessFacts]

    @property
    def alive(self) -> tuple[Found, ...]:
        return tuple(one for one in self.found if one.process.alive)

    def to_json(self) -> dict[str, Any]:
        return {
            "processes": [one.to_json() for one in self.found],
            "refusals": [refusal.to_json() for refusal in self.refusals],
            "targets": [target.to_json() for target in self.targets],
        }


def take_inventory(
    machine: Machine, targets: Sequence[Target], *, mps_clients: frozenset[int] = frozenset()
) -> Inventory:
    """Who belongs to the targets now. Sends nothing and changes nothing.

    What this very process has started besides the targets (a server while a job is cleared) is left out, with
    everything in its session and below it, although it carries the same run's secret.
    """
    processes = dict(machine.processes())
    leaders = {target.leader for target in targets}
    others = frozenset(machine.spawned() - leaders)
    elsewhere = _trees(others, processes)
    sights = {
        pid: Sight(
            process,
            cookie=machine.cookie(pid),
            spawned=process.identity in machine.spawned(),
            came_home=not others and machine.came_home(process),
        )
        for pid, process in processes.items()
        if pid not in elsewhere and pid != machine.pid
    }
    untouched = untouchable(machine.pid, processes)
    found: dict[ProcessIdentity, Found] = {}
    strangers: list[Sight] = []
    grown: list[Target] = []
    for target in targets:
        proven = prove_all(sights, target)
        for identity, proof in proven.items():
            if identity not in found:
                process = processes[identity.pid]
                role = _role(machine, process, leaders)
                refusal = forbidden(process, untouched, mps_clients=mps_clients) or ""
                found[identity] = Found(process, target.name, proof, role, refusal)
        strangers.extend(_of_other_runs(sights, target, proven))
        grown.append(replace(target, members=target.members | frozenset(proven)))
    refusals = [
        _refusal(one.process, one.refusal) for one in found.values() if one.refusal and one.process.alive
    ]
    refusals += [
        _refusal(sight.process, "it carries another run's secret: that run owns it")
        for sight in strangers
        if sight.process.identity not in found
    ]
    return Inventory(tuple(found.values()), tuple(dict.fromkeys(refusals)), tuple(grown), processes)


def segments_held(machine: Machine, members: Sequence[ProcessFacts]) -> frozenset[Segment]:
    """The segments that these processes have open or mapped now: what makes a leftover provably theirs
    later.
    """
    present = {segment.path: segment for segment in machine.segments()}
    held = {one.path for member in members if member.alive for one in machine.open_paths(member.pid)}
    return frozenset(segment for path, segment in present.items() if path in held)


def describe(machine: Machine, identity: ProcessIdentity) -> str:
    """Who that is, for a person who has to go and talk to him: pid, name, user, start, command."""
    process = machine.process(identity.pid)
    if process is None or process.identity != identity:
        return f"pid {identity.pid} (gone by now)"
    started_s = machine.booted_wall_s + identity.start_ticks / TICKS_PER_S
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started_s))
    command = redacted(machine.command(identity.pid)) or "no command line"
    return f"pid {identity.pid} ({process.comm}), user {_user(process.uid)}, since {started}: {command}"


def _role(machine: Machine, process: ProcessFacts, leaders: set[ProcessIdentity | None]) -> Role:
    if process.identity in leaders:
        return Role.LEADER
    tracker = any(_TRACKER_MODULE in word for word in machine.command(process.pid))
    return Role.TRACKER if tracker else Role.MEMBER


def _trees(roots: frozenset[ProcessIdentity], processes: Mapping[int, ProcessFacts]) -> frozenset[int]:
    """Pids in the sessions of these leaders, and below them."""
    inside = {pid for pid, process in processes.items() if any(process.sid == root.pid for root in roots)}
    growing = True
    while growing:
        below = {pid for pid, process in processes.items() if process.ppid in inside} - inside
        inside |= below
        growing = bool(below)
    return frozenset(inside)


def _of_other_runs(
    sights: Mapping[int, Sight], target: Target, proven: Mapping[ProcessIdentity, Proof]
) -> list[Sight]:
    """Those below ours or in our session that carry another secret (perhaps another target's)."""
    pids = {identity.pid for identity in proven}
    return [
        sight
        for sight in sights.values()
        if of_another_run(sight, target) and (sight.process.ppid in pids or sight.process.sid == target.sid)
    ]


def _refusal(process: ProcessFacts, reason: str) -> Refusal:
    return Refusal(process.pid, process.identity.start_ticks, process.comm, reason)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
