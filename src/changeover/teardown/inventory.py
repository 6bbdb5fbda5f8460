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
from changeover.teardown.clearance import Refusal
from changeover.teardown.engine_processes import is_tracker
from changeover.teardown.footprint import Target
from changeover.teardown.guard import forbidden, sparing_only_ourselves, untouchable
from changeover.teardown.moves import Role
from changeover.teardown.ownership import Proof, Sight, of_another_run, prove_all

_SETTLED_S = 2.0


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
class Seen:
    """What one look saw of everybody: by pid, and the secrets found in environments."""

    processes: Mapping[int, ProcessFacts]
    cookies: Mapping[ProcessIdentity, str | None]


@dataclass(frozen=True)
class Inventory:
    """``targets`` are those that were given, with the members seen now added."""

    found: tuple[Found, ...]
    refusals: tuple[Refusal, ...]
    targets: tuple[Target, ...]
    seen: Seen

    @property
    def alive(self) -> tuple[Found, ...]:
        return tuple(one for one in self.found if one.process.alive)

    def to_json(self) -> dict[str, Any]:
        return {
            "processes": [one.to_json() for one in self.found],
            "refusals": [refusal.to_json() for refusal in self.refusals],
            "targets": [target.to_json() for target in self.targets],
        }


def take_inventory(machine: Machine, targets: Sequence[Target]) -> Inventory:
    """Who belongs to the targets now. Sends nothing and changes nothing.

    What this very process has started besides the targets (a server while a job is cleared) is left out, with
    everything in its session and below it, although it carries the same run's secret.
    """
    return _inventory(machine, targets, _see(machine, targets, dict(machine.processes()), {}))


def look_again(
    machine: Machine,
    targets: Sequence[Target],
    before: Inventory,
) -> Inventory:
    """The same, soon after: everybody who was found then, and whoever is new since, is looked at; strangers of then
    are not. What that cannot see is a pid that changed hands in between; the last look is a whole one.
    """
    ours = {one.process.pid for one in before.found}
    processes = {}
    for pid in machine.pids():
        known = before.seen.processes.get(pid) if pid not in ours else None
        process = known or machine.process(pid)
        if process is not None:
            processes[pid] = process
    return _inventory(machine, targets, _see(machine, targets, processes, before.seen.cookies))


def whole_look(
    machine: Machine,
    targets: Sequence[Target],
    before: Inventory,
) -> Inventory:
    """Everybody once more; only environments that were read before are not read again."""
    seen = _see(machine, targets, dict(machine.processes()), before.seen.cookies)
    return _inventory(machine, targets, seen)


def _see(
    machine: Machine,
    targets: Sequence[Target],
    processes: Mapping[int, ProcessFacts],
    cookies: Mapping[ProcessIdentity, str | None],
) -> Seen:
    """Environments are read once; of a process younger than two seconds again, since it may not have come to its exec
    or the kernel not have laid the new environment out. Of those older than every leader they are not read: nothing
    older than its leader is a target's.
    """
    settled_ticks = (machine.clock.wall() - machine.booted_wall_s - _SETTLED_S) * TICKS_PER_S
    oldest_ticks = _oldest_ticks(targets)
    found: dict[ProcessIdentity, str | None] = {}
    for pid, process in processes.items():
        identity = process.identity
        if identity.start_ticks >= oldest_ticks:
            known = identity.start_ticks < settled_ticks and identity in cookies
            seen = cookies.get(identity)  # kept: of a dying process the environment reads empty
            found[identity] = seen if known or seen is not None else machine.cookie(pid)
    return Seen(processes, found)


def _oldest_ticks(targets: Sequence[Target]) -> int:
    """When the first of them started: nothing from before is theirs. 0 where a leader was never written down."""
    if any(target.leader is None for target in targets):
        return 0
    members = (one.start_ticks for target in targets for one in target.members)
    leaders = (target.leader.start_ticks for target in targets if target.leader is not None)
    return min((*members, *leaders), default=0)


def _inventory(machine: Machine, targets: Sequence[Target], seen: Seen) -> Inventory:
    processes = seen.processes
    leaders = {target.leader for target in targets}
    oldest_ticks = _oldest_ticks(targets)
    spawned = machine.spawned()
    others = frozenset(spawned - leaders)
    elsewhere = _trees(others, processes)
    sights = {
        pid: Sight(
            process,
            cookie=seen.cookies.get(process.identity),
            spawned=process.identity in spawned,
            came_home=not others and machine.came_home(process),
        )
        for pid, process in processes.items()
        if process.identity.start_ticks >= oldest_ticks and pid not in elsewhere and pid != machine.pid
    }
    untouched = untouchable(machine.pid, processes)
    adopting = sparing_only_ourselves(untouched)
    found: dict[ProcessIdentity, Found] = {}
    strangers: list[Sight] = []
    grown: list[Target] = []
    for target in targets:
        inside = machine.cgroup_members(target.cgroup) if target.cgroup is not None else frozenset()
        proven = prove_all(sights, target, inside)
        for identity, proof in proven.items():
            if identity not in found:
                process = processes[identity.pid]
                role = _role(machine, process, leaders)
                spared = adopting if target.adopted else untouched
                refusal = forbidden(process, spared) or ""
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
    return Inventory(tuple(found.values()), tuple(dict.fromkeys(refusals)), tuple(grown), seen)


def describe(machine: Machine, identity: ProcessIdentity) -> str:
    """Who that is, for a person who has to go and talk to him: pid, name, user, start, command."""
    process = machine.process(identity.pid)
    if process is None or process.identity != identity:
        return f"pid {identity.pid} (gone by now)"
    started_s = machine.booted_wall_s + identity.start_ticks / TICKS_PER_S
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started_s))
    command = redacted(machine.command(identity.pid)) or "no command line"
    return f"pid {identity.pid} ({process.comm}), user {user_name(process.uid)}, since {started}: {command}"


def _role(machine: Machine, process: ProcessFacts, leaders: set[ProcessIdentity | None]) -> Role:
    if process.identity in leaders:
        return Role.LEADER
    return Role.TRACKER if is_tracker(machine.command(process.pid)) else Role.MEMBER


def _trees(roots: frozenset[ProcessIdentity], processes: Mapping[int, ProcessFacts]) -> frozenset[int]:
    """Pids in the sessions of these leaders, and below them."""
    if not roots:
        return frozenset()
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


def user_name(uid: int) -> str:
    """The name of a user, or the number where it has none here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
