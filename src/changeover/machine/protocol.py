"""What the rest of the program may ask of a machine; ``local.LocalMachine`` and
``simulated.SimulatedMachine`` answer.

Facts out, orders in, nothing decided. A signal is only ever sent through a :class:`Handle`, which names one
process for ever (a pidfd on Linux), never to a number, and never to a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from changeover.machine.clock import Clock
from changeover.machine.gpus import ContextReading, GpuReading
from changeover.machine.ports import Listener, PortReading
from changeover.machine.processes import OpenPath, ProcessFacts, ProcessIdentity
from changeover.machine.shm import Segment, SegmentFacts
from changeover.machine.sockets import SocketFile, UnixSocket
from changeover.machine.surroundings import Surroundings


@dataclass(frozen=True)
class Handle:
    """A hold on one process. ``fd`` is a pidfd (-1 in a simulation)."""

    identity: ProcessIdentity
    fd: int


class Delivery(StrEnum):
    """What became of a signal."""

    SENT = "sent"
    GONE = "gone"
    DENIED = "denied"


@dataclass(frozen=True)
class Holder:
    """A process and one path that it holds open or mapped."""

    identity: ProcessIdentity
    held: OpenPath


class Machine(Protocol):
    """A box with processes, GPUs, ports and shared memory."""

    @property
    def clock(self) -> Clock: ...

    @property
    def boot_id(self) -> str: ...

    @property
    def pid(self) -> int:
        """Changeover's own pid on that machine."""
        ...

    @property
    def pid_max(self) -> int:
        """One more than the largest pid that the kernel gives out."""
        ...

    @property
    def booted_wall_s(self) -> float:
        """Wall time of the boot, to show start ticks as a date."""
        ...

    def processes(self) -> Mapping[int, ProcessFacts]: ...

    def pids(self) -> Sequence[int]:
        """Which pids are taken now, without a look at who has them."""
        ...

    def process(self, pid: int) -> ProcessFacts | None: ...

    def cookie(self, pid: int) -> str | None: ...

    def command(self, pid: int) -> tuple[str, ...]: ...

    def kernel_wait(self, pid: int) -> str:
        """The kernel function that the process sleeps in, for the record of one that will not die."""
        ...

    def open_paths(self, pid: int) -> tuple[OpenPath, ...]: ...

    def holders(self, prefixes: Sequence[str]) -> tuple[Holder, ...]:
        """Who holds a path that starts with one of the prefixes (``/dev/nvidia``, ``socket:[123]``)."""
        ...

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        log: Path,
        cgroup: str | None = None,
    ) -> ProcessIdentity:
        """Start a program in a session of its own, inside the cgroup before its first instruction where one is
        given; raises OSError where it cannot be started.
        """
        ...

    def make_cgroup(self, name: str) -> str | None:
        """A new, empty cgroup (v2) of our own, by path; None where the hierarchy is not ours to write."""
        ...

    def cgroup_members(self, path: str) -> frozenset[int]:
        """Pids in it and below; empty where there is no such cgroup."""
        ...

    def cgroup_populated(self, path: str) -> bool | None:
        """``cgroup.events``: whether anything lives in it or below; None where there is no such cgroup."""
        ...

    def kill_cgroup(self, path: str) -> bool:
        """SIGKILL for everything in it and below, atomically (``cgroup.kill``); False where that cannot be."""
        ...

    def remove_cgroup(self, path: str) -> bool:
        """Take an empty cgroup away; False where it is not empty or not there."""
        ...

    def spawned(self) -> frozenset[ProcessIdentity]:
        """What this very process has spawned and not yet reaped: forked by us and held since."""
        ...

    def came_home(self, process: ProcessFacts) -> bool:
        """Whether an orphan was handed to us as subreaper: our child, though we did not start it."""
        ...

    def exit_code(self, identity: ProcessIdentity) -> int | None:
        """Of a process that we spawned, without reaping it; negative for a signal; None while it runs."""
        ...

    def reap(self, identity: ProcessIdentity) -> None:
        """Take a dead child off the process table; nothing happens for anybody else's."""
        ...

    def open(self, identity: ProcessIdentity) -> Handle | None:
        """A hold on exactly this process, or None where it is gone."""
        ...

    def signal(self, handle: Handle, signal_number: int) -> Delivery: ...

    def wait(self, handles: Sequence[Handle], timeout_s: float) -> None:
        """Until one of them has ended or the time is up."""
        ...

    def close(self, handle: Handle) -> None: ...

    def gpus(self, timeout_s: float) -> GpuReading: ...

    def surroundings(self) -> Surroundings:
        """What can and cannot be seen from here."""
        ...

    def end_mps_client(self, pid: int, timeout_s: float) -> str:
        """Through MPS's control daemon; empty where it is done, else why not."""
        ...

    def watching_gpus(self) -> AbstractContextManager[None]:
        """Inside the block readings are cheap enough to take several a second; blocks may be nested."""
        ...

    def prepare_contexts(self, uuids: Sequence[str]) -> None:
        """Fresh contexts on these GPUs will be asked for soon; inside ``watching_gpus`` only, else nothing."""
        ...

    def fresh_contexts(self, uuids: Sequence[str], timeout_s: float) -> tuple[ContextReading, ...]:
        """One context on each GPU, all at once; in the order given."""
        ...

    def port(self, port: int) -> PortReading: ...

    def listeners(self) -> tuple[Listener, ...]: ...

    def connections(self, ports: Sequence[int]) -> int:
        """Established TCP connections to these local ports."""
        ...

    def segments(self) -> Mapping[Segment, SegmentFacts]: ...

    def unlink(self, segment: Segment) -> bool: ...

    def sockets(self) -> tuple[UnixSocket, ...]:
        """Bound unix sockets that have a file."""
        ...

    def unlink_socket(self, file: SocketFile) -> bool: ...

    def uninterrupted(self) -> AbstractContextManager[None]:
        """Ctrl-C and SIGTERM to ourselves take effect only after the block."""
        ...
