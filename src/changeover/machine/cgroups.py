"""Control groups (v2): the only membership that a process cannot leave by itself, and the only atomic kill.

A cgroup of ours is made below the one that we are in, which needs root or a delegated subtree (cgroup-v2.rst,
"Delegation"); where that is not to be had there is none, and the other proofs carry on. Controllers are never enabled,
so that the rule of no processes in inner nodes does not apply.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from changeover.machine.processes import PROC

ENTER = 'echo 0 > "$1/cgroup.procs" || :; shift; exec "$@"'
"""For ``sh -c``: enter the cgroup that is the first argument, become the program that follows. A millisecond, the same
pid and start time, and not one instruction of the program outside."""


def own_cgroup(proc: Path = PROC) -> Path | None:
    """Where we are in the v2 hierarchy (mounted alone, or beside v1 as "unified"); None where there is none."""
    mount = _mount_point(proc)
    if mount is None:
        return None
    for line in (proc / "self/cgroup").read_text().splitlines():
        if line.startswith("0::/"):
            return mount / line.removeprefix("0::/")
    return None


def make_cgroup(name: str) -> str | None:
    """An empty cgroup below our own, by path; a number is added where the name is taken by a populated one."""
    parent = own_cgroup()
    if parent is None:
        return None
    for attempt in range(100):
        path = parent / (name if attempt == 0 else f"{name}.{attempt}")
        try:
            path.mkdir(exist_ok=True)
        except OSError:  # read-only (containers), not delegated, or v1 only
            return None
        if is_populated(str(path)) is False and os.access(path / "cgroup.procs", os.W_OK):
            return str(path)
        if is_populated(str(path)) is None:
            return None
    return None


def is_populated(path: str) -> bool | None:
    """``cgroup.events``: whether a living process is in it or below; a zombie is none. None where it is not there."""
    try:
        lines = Path(path, "cgroup.events").read_text().split()
    except OSError:
        return None
    return lines[lines.index("populated") + 1] == "1" if "populated" in lines else None


def read_members(path: str) -> frozenset[int]:
    """Pids in it and below. The kernel may list one twice, and 0 for one that this PID namespace does not show."""
    return frozenset(pid for folder in _with_children(Path(path)) for pid in _pids(folder) if pid > 0)


def kill(path: str) -> bool:
    """``cgroup.kill`` (Linux 5.14): SIGKILL to all, forks in flight included."""
    try:
        Path(path, "cgroup.kill").write_text("1")
    except OSError:
        return False
    return True


def remove(path: str) -> bool:
    """It and what an engine may have made below it; False where something lives there."""
    folders = list(_with_children(Path(path)))
    try:
        for folder in reversed(folders):
            folder.rmdir()
    except OSError:
        return False
    return bool(folders)


def _with_children(folder: Path) -> Iterator[Path]:
    try:
        below = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    yield folder
    for child in below:
        yield from _with_children(child)


def _pids(folder: Path) -> list[int]:
    try:
        return [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _mount_point(proc: Path) -> Path | None:
    """Of the cgroup2 file system, where its root is mounted (proc_pid_mountinfo(5))."""
    try:
        lines = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 ") and before.split()[3] == "/":
            return Path(before.split()[4])
    return None
