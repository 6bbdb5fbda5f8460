"""What the state machine sees and what it may order: facts in, actions out."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

from changeover.machine.processes import ProcessIdentity
from changeover.teardown.ownership import Proof


class Role(StrEnum):
    """What a process is to the teardown."""

    LEADER = "leader"
    MEMBER = "member"
    TRACKER = "tracker"  # multiprocessing's: unlinks segments when everybody else is gone; killed last


@dataclass(frozen=True)
class Member:
    """A process of ours that is alive now, and may be signalled.

    ``fast``: once it is proven idle, nothing speaks against SIGKILL without SIGTERM before.
    """

    identity: ProcessIdentity
    role: Role
    proof: Proof
    dumping_core: bool = False
    fast: bool = False


@dataclass(frozen=True)
class Facts:
    """One look at the machine: ``members`` alive and signallable, ``running`` requests, where the engine says;
    ``mute`` where it answers (or refuses) without saying, which no waiting mends; ``proven_idle`` where the
    engine gives an exact proof; ``populated``: something lives in a cgroup of ours.
    """

    members: tuple[Member, ...]
    can_drain: bool = False
    running: int | None = None
    mute: bool = False
    proven_idle: bool = False
    populated: bool = False


@dataclass(frozen=True)
class Signal:
    """An order: send this to that process."""

    identity: ProcessIdentity
    number: signal.Signals
    proof: Proof


@dataclass(frozen=True)
class BeginDrain:
    """An order: ask the servers to refuse new work."""


@dataclass(frozen=True)
class CutDrain:
    """An order: end the requests that still run; their time is up."""


@dataclass(frozen=True)
class KillCgroups:
    """An order: the kernel's atomic kill of everything in our cgroups."""


@dataclass(frozen=True)
class ListHolders:
    """An order: find out who has a GPU's device file open."""


Action = Signal | BeginDrain | CutDrain | KillCgroups | ListHolders
