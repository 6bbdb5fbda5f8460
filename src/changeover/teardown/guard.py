"""Who is never signalled, whatever has been proven of him."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from changeover.machine.processes import ProcessFacts
from changeover.machine.surroundings import MPS_COMM


@dataclass(frozen=True)
class Untouchable:
    """Ourselves and what we hang on: ``ancestors`` up to init, our group and our session (None: not spared)."""

    own_pid: int
    ancestors: frozenset[int]
    pgid: int | None
    sid: int | None


def untouchable(own_pid: int, processes: Mapping[int, ProcessFacts]) -> Untouchable:
    """Built from one look at the machine; a parent that the look does not show (pid 0) ends the chain."""
    ancestors: set[int] = set()
    own = processes.get(own_pid)
    parent = own.ppid if own is not None else 0
    while parent > 0 and parent not in ancestors:
        ancestors.add(parent)
        above = processes.get(parent)
        parent = above.ppid if above is not None else 0
    return Untouchable(
        own_pid=own_pid,
        ancestors=frozenset(ancestors),
        pgid=own.pgid if own is not None else own_pid,
        sid=own.sid if own is not None else own_pid,
    )


def sparing_only_ourselves(untouched: Untouchable) -> Untouchable:
    """For processes that the user has adopted one by one: a server started from the shell that Changeover runs in
    shares its session, and without job control its group. Ourselves and our ancestors stay out of reach.
    """
    return replace(untouched, pgid=None, sid=None)


def forbidden(process: ProcessFacts, untouched: Untouchable) -> str | None:
    """Why this process must not be signalled, or None.

    ``kill(getppid())`` with a parent outside the PID namespace is ``kill(0)`` and ended a desktop
    (flux-core #5791); a container's cleaner that killed its own shell is prime-rl #2331; CUDA MPS's server and control
    daemon have other people's clients.
    """
    rules = (
        (process.pid <= 1, "pid 1 or below is the system's"),
        (process.pid == untouched.own_pid, "that is Changeover itself"),
        (process.pid in untouched.ancestors, "it is an ancestor of Changeover"),
        (process.sid == untouched.sid, "it is in Changeover's own session"),
        (process.pgid == untouched.pgid, "it is in Changeover's own process group"),
        (process.comm.startswith("sshd"), "sshd carries people's connections"),
        (
            process.comm == MPS_COMM,
            "it is CUDA MPS itself: end it with `nvidia-cuda-mps-control`, quit",
        ),
    )
    return next((reason for applies, reason in rules if applies), None)
