"""What the members of a target hold outside themselves while they live, and what of it is left when they are gone:
segments, files of unix sockets, ports beyond the declared ones, the cgroup.

Only what was seen in the hands of a member may be removed, and only when nobody has it any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from changeover.machine.ports import Listener
from changeover.machine.processes import ProcessFacts, ProcessIdentity
from changeover.machine.protocol import Machine
from changeover.machine.shm import SHM_ROOT, Segment, is_segment
from changeover.machine.sockets import SocketFile
from changeover.teardown.clearance import Evidence, Verdict
from changeover.teardown.footprint import Target
from changeover.teardown.inventory import describe, take_inventory

_EMPTY_WAIT_S = 1.0
_LOOK_S = 0.02
_SHM = f"{SHM_ROOT}/"


@dataclass(frozen=True)
class Held:
    """What some processes have open, mapped, bound or listened on at one moment."""

    segments: frozenset[Segment] = frozenset()
    sockets: frozenset[SocketFile] = frozenset()
    listeners: frozenset[Listener] = frozenset()

    @property
    def ports(self) -> frozenset[int]:
        return frozenset(one.port for one in self.listeners)


def held_by(machine: Machine, members: Iterable[ProcessFacts]) -> Held:
    """What these processes hold now; the dead hold nothing."""
    living = [member.pid for member in members if member.alive]
    if not living:
        return Held()
    held = [one for pid in living for one in machine.open_paths(pid)]
    sockets = {one.path for one in held if one.path.startswith("socket:[")}
    in_shm = [one for one in held if one.path.startswith(_SHM)]
    bound = machine.sockets() if sockets else ()
    listened = machine.listeners() if sockets else ()
    return Held(
        segments=frozenset(
            segment for segment in machine.segments() if any(is_segment(one, segment) for one in in_shm)
        ),
        sockets=frozenset(one.file for one in bound if f"socket:[{one.inode}]" in sockets),
        listeners=frozenset(one for one in listened if f"socket:[{one.inode}]" in sockets),
    )


def with_held(target: Target, held: Held) -> Target:
    """The target with this added to what was seen before."""
    derived = {*target.derived_ports, *held.ports} - set(target.ports)
    return replace(
        target,
        segments=target.segments | held.segments,
        sockets=target.sockets | held.sockets,
        derived_ports=tuple(sorted(derived)),
    )


def observe(machine: Machine, target: Target) -> Target:
    """The target with the members seen now added, and what they hold; call it while the phase runs.

    What was seen once is provable for ever: a worker that leaves the session and drops its environment afterwards is
    still known by its start time, and a segment that it leaves behind is known to be its.
    """
    inventory = take_inventory(machine, (target,))
    (grown,) = inventory.targets
    return with_held(grown, held_by(machine, [one.process for one in inventory.found]))


def clear_sockets(machine: Machine, targets: Sequence[Target]) -> tuple[Evidence, ...]:
    """Unlink the socket files that members left behind; vLLM never removes its own, even after a clean stop."""
    seen = frozenset().union(*(target.sockets for target in targets))
    if not seen:
        return ()
    bound = {one.file for one in machine.sockets()}
    removed = sorted(file.path for file in seen - bound if machine.unlink_socket(file))
    still = sorted(file.path for file in seen & bound)
    expected = "no socket file of ours left"
    note = f"removed, seen bound by ours: {', '.join(removed)}" if removed else ""
    if still:
        return (Evidence("sockets", Verdict.DIRTY, expected, f"still bound: {', '.join(still)}", note),)
    return (Evidence("sockets", Verdict.CLEAN, expected, f"{len(seen)} known, none left", note),)


def look_at_derived_ports(
    machine: Machine, targets: Sequence[Target], known: frozenset[ProcessIdentity]
) -> tuple[Evidence, ...]:
    """Ports that members listened on beyond the declared ones: rpc, NCCL, gloo (sglang PR #31645).

    They were the kernel's choice, so that a stranger who has one of them now is no obstacle and is only named.
    """
    wanted = {port for target in targets for port in target.derived_ports}
    if not wanted:
        return ()
    sockets = {f"socket:[{one.inode}]": one.port for one in machine.listeners() if one.port in wanted}
    holders = machine.holders(tuple(sockets)) if sockets else ()
    ours = sorted({sockets[one.held.path] for one in holders if one.identity in known})
    others = {one.identity: sockets[one.held.path] for one in holders if one.identity not in known}
    note = "; ".join(f"{port} is now {describe(machine, who)}'s" for who, port in sorted(others.items()))
    expected = "none of ours listens on a port of its own choice"
    seen = f"{len(wanted)} known, none held by ours"
    if ours:
        return (Evidence("derived-ports", Verdict.DIRTY, expected, f"held by ours: {ours}", note),)
    return (Evidence("derived-ports", Verdict.CLEAN, expected, seen, note),)


def empty_cgroups(machine: Machine, targets: Sequence[Target]) -> tuple[Evidence, ...]:
    """``populated 0`` is the kernel's own word that nobody is left; an empty cgroup is taken away."""
    return tuple(_empty(machine, target.cgroup) for target in targets if target.cgroup is not None)


def _empty(machine: Machine, path: str) -> Evidence:
    item, expected = f"cgroup:{PurePosixPath(path).name}", "populated 0"
    until_s = machine.clock.monotonic() + _EMPTY_WAIT_S
    while (populated := machine.cgroup_populated(path)) and machine.clock.monotonic() < until_s:
        machine.clock.sleep(_LOOK_S)
    if populated is None:
        return Evidence(item, Verdict.CLEAN, expected, "gone")
    if populated:
        pids = sorted(machine.cgroup_members(path))
        return Evidence(item, Verdict.UNKILLABLE, expected, f"populated 1: pids {pids or 'not visible here'}")
    removed = "removed" if machine.remove_cgroup(path) else "left there, empty"
    return Evidence(item, Verdict.CLEAN, expected, f"populated 0, {removed}")
