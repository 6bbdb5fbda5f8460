"""What a phase may leave on a machine: the baseline before it, and the targets that it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from changeover.machine.errors import InvalidInput
from changeover.machine.gpus import GpuFacts, Presence
from changeover.machine.processes import ProcessIdentity
from changeover.machine.protocol import Machine
from changeover.machine.shm import Segment
from changeover.machine.sockets import SocketFile

_PROBE_TIMEOUT_S = 10.0


class Drain(Protocol):
    """How to let a server end its work; an engine provides it. Senders are stopped before, by the caller.

    Each call must end by itself within a second or two; whatever it raises is noted and ends no teardown.
    """

    @property
    def name(self) -> str:
        """How it is done, for the record (``POST /drain``)."""
        ...

    def begin(self) -> None:
        """Refuse new work, where the server can."""
        ...

    def running(self) -> int | None:
        """Requests running and waiting now; None where the server does not say."""
        ...

    def proves_idle(self) -> bool:
        """An exact proof that nothing runs, where the engine gives one (SGLang answers ``/flush_cache`` with 200 then
        only); False where it gives none.
        """
        ...

    def cut(self) -> None:
        """End what still runs, at the drain's deadline, where the server can."""
        ...


class StopPolicy(StrEnum):
    """How a server is ended once it is idle.

    FAST skips the courtesy of SIGTERM for a server that is proven idle: it has nothing left to finish, and the kernel
    gives its memory back sooner than the engine's own shutdown does (SGLang: 4.2 to 4.6 s on an H200).
    """

    GRACEFUL = "graceful"
    FAST = "fast"


@dataclass(frozen=True)
class GpuBaseline:
    """One GPU before the phase. ``pids`` are those in the driver's lists then (a desktop, a monitor), ``shares`` what
    each held in MiB, where the driver told.
    """

    uuid: str
    name: str
    used_mib: float
    memory_call: str
    pids: tuple[int, ...]
    persistence: bool | None = None
    shares: tuple[tuple[int, float], ...] = ()

    def allowed_mib(self, now: GpuFacts) -> float:
        """What may be in use now: less what strangers of then hold no longer, or their end would hide our leftover.

        What they hold more by now is not added: memory that ours exported (CUDA IPC) is charged to them.
        """
        share_now = shares_of(now)
        given_back = sum(max(0.0, share - share_now.get(pid, 0.0)) for pid, share in self.shares)
        return max(0.0, self.used_mib - given_back)


def shares_of(gpu: GpuFacts) -> dict[int, float]:
    """MiB by pid where the driver tells; a pid may be in two of its lists, with the same memory."""
    shares: dict[int, float] = {}
    for process in gpu.processes:
        if process.used_mib is not None:
            shares[process.pid] = max(process.used_mib, shares.get(process.pid, 0.0))
    return shares


@dataclass(frozen=True)
class Baseline:
    """The machine before a phase: taken before the phase, never before the kill (ollama #11997).

    ``gpus`` is empty with ``presence`` "absent" where there is none; presence "unreadable" makes every
    later verdict on the GPUs "unverified".
    """

    presence: Presence
    gpus: tuple[GpuBaseline, ...]
    segments: frozenset[Segment]
    boot_id: str
    taken_wall_s: float
    note: str = ""

    def by_uuid(self) -> dict[str, GpuBaseline]:
        return {gpu.uuid: gpu for gpu in self.gpus}

    def to_json(self) -> dict[str, Any]:
        return {
            "presence": self.presence.value,
            "gpus": [{**vars(gpu), "pids": list(gpu.pids)} for gpu in self.gpus],
            "segments": [segment.to_json() for segment in sorted(self.segments)],
            "boot_id": self.boot_id,
            "taken_wall_s": self.taken_wall_s,
            "note": self.note,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Baseline:
        """Raises InvalidInput where it is not what ``to_json`` writes."""
        try:
            return cls(
                presence=Presence(value["presence"]),
                gpus=tuple(_gpu_from_json(gpu) for gpu in value["gpus"]),
                segments=frozenset(Segment(**segment) for segment in value["segments"]),
                boot_id=value["boot_id"],
                taken_wall_s=value["taken_wall_s"],
                note=value["note"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _not_ours("a baseline", value, error) from error


def _gpu_from_json(value: Mapping[str, Any]) -> GpuBaseline:
    shares = tuple((int(pid), float(mib)) for pid, mib in value.get("shares", ()))
    return GpuBaseline(**{**value, "pids": tuple(value["pids"]), "shares": shares})


def take_baseline(machine: Machine, *, probe_timeout_s: float = _PROBE_TIMEOUT_S) -> Baseline:
    """Look at the machine before a phase: memory of each GPU by UUID, and the set in ``/dev/shm``."""
    reading = machine.gpus(probe_timeout_s)
    return Baseline(
        presence=reading.presence,
        gpus=tuple(
            GpuBaseline(
                uuid=gpu.uuid,
                name=gpu.name,
                used_mib=gpu.used_mib,
                memory_call=gpu.memory_call,
                pids=tuple(sorted({process.pid for process in gpu.processes})),
                persistence=gpu.persistence,
                shares=tuple(sorted(shares_of(gpu).items())),
            )
            for gpu in reading.gpus
        ),
        segments=frozenset(machine.segments()),
        boot_id=machine.boot_id,
        taken_wall_s=machine.clock.wall(),
        note=reading.note,
    )


@dataclass(frozen=True)
class Target:
    """One thing that a phase started and that must be gone after it.

    ``leader`` and ``sid`` are None where Changeover died between starting the process and writing it down:
    then the cookie alone proves. ``members`` were seen as its descendants (``leftovers.observe``), ``segments``
    were seen held by one of them, ``sockets`` are files of unix sockets that one of them had bound, ``derived_ports``
    were listened on by one of them beyond the declared ``ports``. ``files`` are folders or files that it writes.
    ``cgroup`` is the one that we made for it. ``adopted`` is empty for what we launched; for a server of somebody
    else it holds the evidence of each member that the user's word covers. The cookie is a secret: never in
    ``to_json``, nor in a repr.
    """

    name: str
    cookie: str = field(repr=False)
    leader: ProcessIdentity | None
    sid: int | None
    members: frozenset[ProcessIdentity] = frozenset()
    segments: frozenset[Segment] = frozenset()
    ports: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    drain: Drain | None = field(default=None, compare=False, repr=False)
    sockets: frozenset[SocketFile] = frozenset()
    derived_ports: tuple[int, ...] = ()
    cgroup: str | None = None
    adopted: Mapping[ProcessIdentity, str] = field(default_factory=dict)
    stop: StopPolicy = StopPolicy.GRACEFUL

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "leader": None if self.leader is None else self.leader.to_json(),
            "sid": self.sid,
            "members": [member.to_json() for member in sorted(self.members)],
            "segments": [segment.to_json() for segment in sorted(self.segments)],
            "ports": list(self.ports),
            "files": list(self.files),
            "sockets": [socket.to_json() for socket in sorted(self.sockets)],
            "derived_ports": list(self.derived_ports),
            "cgroup": self.cgroup,
            "adopted": [{**member.to_json(), "why": why} for member, why in sorted(self.adopted.items())],
            "stop": self.stop.value,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, cookie: str, drain: Drain | None = None) -> Target:
        """Raises InvalidInput where it is not what ``to_json`` writes, in this version or in 0.1."""
        try:
            leader = value["leader"]
            return cls(
                name=value["name"],
                cookie=cookie,
                leader=None if leader is None else ProcessIdentity(**leader),
                sid=value["sid"],
                members=frozenset(ProcessIdentity(**member) for member in value["members"]),
                segments=frozenset(Segment(**segment) for segment in value["segments"]),
                ports=tuple(value["ports"]),
                files=tuple(value["files"]),
                drain=drain,
                sockets=frozenset(SocketFile(**socket) for socket in value.get("sockets", ())),
                derived_ports=tuple(value.get("derived_ports", ())),
                cgroup=value.get("cgroup"),
                adopted=dict(_adopted(member) for member in value.get("adopted", ())),
                stop=StopPolicy(value.get("stop", StopPolicy.GRACEFUL)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _not_ours("a target", value, error) from error


def _adopted(member: Mapping[str, Any]) -> tuple[ProcessIdentity, str]:
    identity = ProcessIdentity(member["pid"], member["start_ticks"], member["boot_id"])
    return identity, member["why"]


def _not_ours(what: str, value: object, error: Exception) -> InvalidInput:
    return InvalidInput(
        expected=f"{what} as Changeover writes it",
        seen=f"{str(value)[:200]} ({type(error).__name__}: {error})",
        todo="The record is damaged or from another version; clear the machine by hand and start a new run.",
    )
