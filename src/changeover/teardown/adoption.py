"""Adopting a server that somebody else started: find its tree, show it with evidence, take exactly it.

What a wish names (``--pid``, ``--port``, ``--engine``) is a search, not a proof: the proof is the user's word for the
tree that is shown, each member pinned by its start time. Whoever appears later counts only as a descendant of a member.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from changeover.machine.errors import ChangeoverError, InvalidInput
from changeover.machine.ports import Listener
from changeover.machine.processes import ProcessFacts, ProcessIdentity, redacted
from changeover.machine.protocol import Machine
from changeover.teardown.engine_processes import engine_of, http_port, is_tracker
from changeover.teardown.footprint import StopPolicy, Target
from changeover.teardown.guard import forbidden, sparing_only_ourselves, untouchable
from changeover.teardown.inventory import user_name

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - compared with, never bound


class TreeRefused(ChangeoverError):  # noqa: N818
    """What was named must not be taken: it is ourselves, another run's, another user's."""

    exit_code = 5


@dataclass(frozen=True)
class Wish:
    """What the user named; at least one of the three."""

    pids: tuple[int, ...] = ()
    ports: tuple[int, ...] = ()
    engine: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"pids": list(self.pids), "ports": list(self.ports), "engine": self.engine}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Wish:
        return cls(tuple(value["pids"]), tuple(value["ports"]), value["engine"])


@dataclass(frozen=True)
class AdoptedMember:
    """One process of a tree, with the reason why it belongs to it. ``gpu_mib`` is None where no driver lists it."""

    identity: ProcessIdentity
    comm: str
    command: str
    user: str
    rss_mib: float
    gpu_mib: float | None
    why: str

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "identity": self.identity.to_json(), "rss_mib": round(self.rss_mib, 1)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AdoptedMember:
        return cls(**{**value, "identity": ProcessIdentity(**value["identity"])})


@dataclass(frozen=True)
class Tree:
    """A server found. ``ports`` it listens on, ``clients`` connections to them now, ``url`` where its engine answers;
    ``refusal`` says why it cannot be taken, and is empty where it can.
    """

    name: str
    engine: str | None
    root: ProcessIdentity
    members: tuple[AdoptedMember, ...]
    ports: tuple[int, ...] = ()
    clients: int = 0
    url: str | None = None
    refusal: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "root": self.root.to_json(),
            "members": [member.to_json() for member in self.members],
            "ports": list(self.ports),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Tree:
        """Raises InvalidInput where it is not what ``to_json`` writes."""
        try:
            members = tuple(AdoptedMember.from_json(member) for member in value["members"])
            root = ProcessIdentity(**value["root"])
            return cls(**{**value, "root": root, "members": members, "ports": tuple(value["ports"])})
        except (KeyError, TypeError) as error:
            raise InvalidInput(
                expected="a tree as Changeover writes it",
                seen=f"{str(value)[:200]} ({type(error).__name__}: {error})",
                todo="Use the same version of Changeover on both sides.",
            ) from error

    def to_text(self) -> str:
        """For people who are asked whether this is the one."""
        about = [f"ports {', '.join(map(str, self.ports))}" if self.ports else "no port"]
        about += [f"{self.clients} connections"] if self.clients else []
        lines = [f"{self.name}: {len(self.members)} processes, {', '.join(about)}"]
        for one in self.members:
            gpu = "" if one.gpu_mib is None else f", {one.gpu_mib:.0f} MiB of GPU memory"
            lines.append(
                f"  pid {one.identity.pid} ({one.comm}), user {one.user}, {one.rss_mib:.0f} MiB{gpu}"
            )
            lines.append(f"    {one.command}")
            lines.append(f"    {one.why}")
        if self.refusal:
            lines.append(f"  not taken: {self.refusal}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Look:
    """One look at the machine; command lines are read once and only for those who are asked about."""

    machine: Machine
    processes: Mapping[int, ProcessFacts]
    listeners: tuple[Listener, ...]
    _commands: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def command(self, pid: int) -> tuple[str, ...]:
        if pid not in self._commands:
            self._commands[pid] = self.machine.command(pid)
        return self._commands[pid]

    def engine(self, pid: int) -> str | None:
        return engine_of(self.command(pid))

    def below(self, pid: int) -> list[int]:
        """Its descendants along living parents, nearest first."""
        found, waiting = [], [pid]
        children: dict[int, list[int]] = {}
        for process in self.processes.values():
            children.setdefault(process.ppid, []).append(process.pid)
        while waiting:
            for child in sorted(children.get(waiting.pop(0), [])):
                found.append(child)
                waiting.append(child)
        return found


def find_trees(machine: Machine, wish: Wish) -> tuple[Tree, ...]:
    """The trees that a wish names; empty only where an engine was named and none of its processes is there.

    Raises InvalidInput where nobody has a pid or listens on a port that was named.
    """
    look = _Look(machine, machine.processes(), machine.listeners())
    roots: dict[int, str] = {}
    for pid in wish.pids:
        roots.setdefault(_expect_alive(look, pid), "named by its pid")
    for port in wish.ports:
        for pid, why in _roots_of_port(look, port):
            roots.setdefault(pid, why)
    if wish.engine is not None:
        for pid, why in _roots_of_engine(look, wish.engine):
            roots.setdefault(pid, why)
    trees: list[Tree] = []
    taken: set[int] = set()
    for pid in sorted(roots, key=lambda one: look.processes[one].identity.start_ticks):
        if pid not in taken:
            members = _members(look, pid, roots)
            taken |= set(members)
            trees.append(_tree(look, pid, members, wish))
    return tuple(trees)


def targets_of(trees: Sequence[Tree], stop: StopPolicy | None = None) -> list[Target]:
    """What teardown is to clear: exactly the members that were shown, and what descends from them.

    A session is no proof here: it may be the shell's from which the server was started.
    """
    return [
        Target(
            name=tree.name,
            cookie=secrets.token_hex(16),
            leader=tree.root,
            sid=None,
            members=frozenset(member.identity for member in tree.members),
            ports=tree.ports,
            adopted={member.identity: member.why for member in tree.members},
            stop=stop or StopPolicy.GRACEFUL,
        )
        for tree in trees
    ]


def _expect_alive(look: _Look, pid: int) -> int:
    process = look.processes.get(pid)
    if process is None:
        raise InvalidInput(
            expected=f"a process with pid {pid}",
            seen="nobody has that pid",
            todo="`changeover clear --engine NAME` finds the orphans of a server whose leader is gone.",
        )
    if not process.alive:
        raise InvalidInput(
            expected=f"a living process with pid {pid}",
            seen=f"a zombie: it has released everything and waits for its parent, pid {process.ppid}",
            todo="Nothing is left to stop there; `changeover clear --engine NAME` finds workers that it left.",
        )
    return pid


def _roots_of_port(look: _Look, port: int) -> list[tuple[int, str]]:
    inodes = [f"socket:[{one.inode}]" for one in look.listeners if one.port == port]
    if not inodes:
        raise InvalidInput(
            expected=f"somebody who listens on port {port}",
            seen="nobody does",
            todo="A server that half died may have left workers without its port: `changeover clear --engine NAME`.",
        )
    holders = {holder.identity.pid for holder in look.machine.holders(inodes)} & set(look.processes)
    if not holders:
        raise InvalidInput(
            expected=f"to see who listens on port {port}",
            seen="its owner is another user's process or in another PID namespace",
            todo="Run this as root on the host, or inside the container that the server runs in.",
        )
    tops: dict[int, str] = {}
    for pid in sorted(holders):
        top, why = _climb(look, pid, holders), f"listens on port {port}"
        tops[top] = why if top in holders else f"started pid {pid}, which {why}"
    return list(tops.items())


def _climb(look: _Look, pid: int, holders: set[int]) -> int:
    """Up to the top of the server: while the parent has the same socket or is a process of the same engine."""
    engine = look.engine(pid)
    while True:
        parent = look.processes.get(look.processes[pid].ppid)
        if parent is None or parent.pid <= 1:
            return pid
        if parent.pid not in holders and (engine is None or look.engine(parent.pid) != engine):
            return pid
        pid = parent.pid


def _roots_of_engine(look: _Look, engine: str) -> list[tuple[int, str]]:
    found = []
    for pid, process in look.processes.items():
        if not process.alive or look.engine(pid) != engine:
            continue
        if process.ppid in look.processes and look.engine(process.ppid) == engine:
            continue
        shown = redacted(look.command(pid), 60)
        orphan = ", an orphan: its leader is gone" if _is_orphan(look, process) else ""
        found.append((pid, f"looks like {engine} ({shown}){orphan}"))
    return found


def _is_orphan(look: _Look, process: ProcessFacts) -> bool:
    """Its process group's leader is gone and its parent is of another session: init, or a subreaper."""
    parent = look.processes.get(process.ppid)
    return (
        process.pid != process.pgid
        and process.pgid not in look.processes
        and (parent is None or parent.sid != process.sid)
    )


def _members(look: _Look, root: int, roots: Mapping[int, str]) -> dict[int, str]:
    """The root and what descends from it; orphans of the same dead leader; the resource trackers that serve them."""
    found = {root: roots[root]}
    found |= dict.fromkeys(look.below(root), f"descends from pid {root}")
    first = look.processes[root]
    engine = look.engine(root)
    if engine is not None and _is_orphan(look, first):
        for pid, process in look.processes.items():
            same_job = (process.sid, process.pgid) == (first.sid, first.pgid)
            if pid not in found and same_job and look.engine(pid) == engine and _is_orphan(look, process):
                found[pid] = f"orphan of {engine} in the process group of pid {root}"
                found |= dict.fromkeys(look.below(pid), f"descends from pid {pid}")
    return found | _trackers(look, found)


def _trackers(look: _Look, members: Collection[int]) -> dict[int, str]:
    """A tracker reads from a pipe that those whom it serves hold open: the same inode proves whose it is.

    It stays in the session in which it was started, so that nobody else's command line has to be read.
    """
    sessions = {look.processes[pid].sid for pid in members}
    beside = [
        process.pid
        for process in look.processes.values()
        if process.sid in sessions and process.pid not in members and process.alive
    ]
    trackers = [pid for pid in beside if is_tracker(look.command(pid))]
    pipes = {path: pid for pid in members for path in _pipes(look, pid)} if trackers else {}
    found = {}
    for pid in trackers:
        served = [pipes[path] for path in _pipes(look, pid) if path in pipes]
        if served:
            found[pid] = f"resource tracker: its pipe is held by pid {min(served)}"
    return found


def _pipes(look: _Look, pid: int) -> set[str]:
    return {one.path for one in look.machine.open_paths(pid) if one.path.startswith("pipe:[")}


def _tree(look: _Look, root: int, members: Mapping[int, str], wish: Wish) -> Tree:
    machine = look.machine
    engine = next((kind for pid in members for kind in (look.engine(pid),) if kind is not None), None)
    on_gpu = _gpu_mib(machine)
    sockets = {f"socket:[{one.inode}]": one for one in look.listeners}
    held = {one.path for pid in members for one in machine.open_paths(pid) if one.path.startswith("socket:[")}
    listened = [sockets[path] for path in sorted(held) if path in sockets]
    ports = tuple(sorted({one.port for one in listened}))
    described = tuple(
        AdoptedMember(
            identity=look.processes[pid].identity,
            comm=look.processes[pid].comm,
            command=redacted(look.command(pid)) or "no command line",
            user=user_name(look.processes[pid].uid),
            rss_mib=look.processes[pid].rss_mib,
            gpu_mib=on_gpu.get(pid),
            why=why,
        )
        for pid, why in members.items()
        if look.processes[pid].alive
    )
    return Tree(
        name=f"{engine or look.processes[root].comm}-{root}",
        engine=engine,
        root=look.processes[root].identity,
        members=described,
        ports=ports,
        clients=machine.connections(ports),
        url=_url(look, root, engine, listened, wish),
        refusal=_refusal(look, members, wish),
    )


def _gpu_mib(machine: Machine) -> dict[int, float]:
    used: dict[int, float] = {}
    for gpu in machine.gpus(10.0).gpus:
        for process in gpu.processes:
            used[process.pid] = used.get(process.pid, 0.0) + (process.used_mib or 0.0)
    return used


def _url(look: _Look, root: int, engine: str | None, listened: Sequence[Listener], wish: Wish) -> str | None:
    """Where the engine answers: the port that was named or that its command line asks for, if it listens there.

    No other port is ever connected to: a stray connection hangs NCCL's bootstrap (NVIDIA/nccl #1808).
    """
    if engine is None:
        return None
    wanted = (*wish.ports, http_port(engine, look.command(root)))
    for port in wanted:
        for one in listened:
            if one.port == port:
                host = f"[{one.address}]" if ":" in one.address else one.address
                return f"http://{_ANY_ADDRESS.get(one.address, host)}:{port}"
    return None


def _refusal(look: _Look, members: Mapping[int, str], wish: Wish) -> str:
    untouched = sparing_only_ourselves(untouchable(look.machine.pid, look.processes))
    own = look.processes.get(look.machine.pid)
    for pid in members:
        process = look.processes[pid]
        reason = forbidden(process, untouched)
        if reason is not None:
            return f"pid {pid} ({process.comm}): {reason}"
        if look.machine.cookie(pid) is not None:
            return f"pid {pid} belongs to a run of Changeover: `changeover stop`, or `changeover clear --run`"
        if own is not None and process.uid != own.uid and pid not in wish.pids:
            return f"pid {pid} is user {user_name(process.uid)}'s: name it by --pid if you mean it"
    return ""


def pinned(machine: Machine, trees: Sequence[Tree]) -> tuple[Tree, ...]:
    """The trees with those members that are still the same processes; raises InvalidInput for another boot's."""
    for tree in trees:
        if tree.root.boot_id != machine.boot_id:
            raise InvalidInput(
                expected=f"a tree that was found since this machine's boot ({machine.boot_id})",
                seen=f"one of boot {tree.root.boot_id}",
                todo="Look again: `changeover clear --dry-run`.",
            )
    return tuple(
        replace(tree, members=tuple(one for one in tree.members if _lives(machine, one.identity)))
        for tree in trees
    )


def _lives(machine: Machine, identity: ProcessIdentity) -> bool:
    process = machine.process(identity.pid)
    return process is not None and process.identity == identity
