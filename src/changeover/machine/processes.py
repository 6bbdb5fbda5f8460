"""Processes as ``/proc`` tells them: who they are, what state they are in, what they hold open.

Three traps decide the shape of this module:

* A process may name itself ``a b) R 1 (x``: ``/proc/PID/stat`` is split after its *last* parenthesis
  (proc(5)).
* A pid alone names nobody: an identity is pid + start time in clock ticks since boot + boot id.
* State ``Z`` is said of the main thread only. A process whose main thread has ended while another thread
  lives still holds its ports and files, and its ``/proc/PID/fd`` lists nothing: they are in
  ``/proc/PID/task/TID/fd``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
COOKIE_VARIABLE = "CHANGEOVER_COOKIE"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PF_DUMPCORE = 0x200  # include/linux/sched.h: the process is writing its core
O_ACCMODE = os.O_RDONLY | os.O_WRONLY | os.O_RDWR
_SECRET_WORDS = ("key", "token", "secret", "password", "cookie")
_STAT_BYTES = 4096  # 52 fields, most of them a digit
_VANISHED = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True, order=True)
class ProcessIdentity:
    """One process for ever: ``start_ticks`` is field 22 of ``/proc/PID/stat`` (clock ticks since boot)."""

    pid: int
    start_ticks: int
    boot_id: str

    def to_json(self) -> dict[str, int | str]:
        return {"pid": self.pid, "start_ticks": self.start_ticks, "boot_id": self.boot_id}


@dataclass(frozen=True)
class ProcessFacts:
    """What ``/proc/PID/stat`` said at one moment.

    ``living_tasks`` counts the threads that are not dead; it is counted only where the main thread is dead
    (state Z or X) and is 1 otherwise, since a process whose main thread lives, lives.
    """

    identity: ProcessIdentity
    ppid: int
    pgid: int
    sid: int
    state: str
    comm: str
    uid: int
    flags: int
    cpu_ticks: int
    rss_mib: float
    living_tasks: int

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def alive(self) -> bool:
        """False for a true zombie only: it has released everything and waits for its parent to look."""
        return self.living_tasks > 0

    @property
    def dumping_core(self) -> bool:
        return bool(self.flags & PF_DUMPCORE)


@dataclass(frozen=True)
class OpenPath:
    """A thing that a process holds: ``path`` as the kernel writes it (``socket:[123]``, ``/dev/shm/x``).

    ``inode`` is known of mappings only. It is needed for semaphores: glibc's ``sem_open`` makes them under another name
    and links them to theirs, so that the mapping shows a name that is gone.
    """

    path: str
    writable: bool
    mapped: bool
    inode: int = 0


def read_boot_id(proc: Path = PROC) -> str:
    """The id that the kernel draws at each boot; pids and start ticks mean nothing without it."""
    return (proc / "sys/kernel/random/boot_id").read_text().strip()


def parse_stat(text: str, *, uid: int, boot_id: str, living_tasks: int) -> ProcessFacts:
    """Read one ``stat`` line; field numbers as in proc(5), after the last parenthesis."""
    opening, closing = text.index("("), text.rindex(")")
    rest = text[closing + 1 :].split()
    return ProcessFacts(
        identity=ProcessIdentity(int(text[:opening]), int(rest[19]), boot_id),
        ppid=int(rest[1]),
        pgid=int(rest[2]),
        sid=int(rest[3]),
        state=rest[0],
        comm=text[opening + 1 : closing],
        uid=uid,
        flags=int(rest[6]),
        cpu_ticks=int(rest[11]) + int(rest[12]),
        rss_mib=int(rest[21]) * PAGE_BYTES / 2**20,
        living_tasks=living_tasks,
    )


def read_process(pid: int, boot_id: str, proc: Path = PROC) -> ProcessFacts | None:
    """The process that has this pid now, or None where nobody has it."""
    line = _stat_line(pid, proc)
    return None if line is None else _parsed(line, pid, boot_id, proc)


class ProcessTable:
    """Looks at everybody again and again: a line that is what it was last time is not taken apart again.

    That is half of what a look costs, and on a box most processes sleep.
    """

    def __init__(self, boot_id: str, proc: Path = PROC) -> None:
        self._boot_id = boot_id
        self._proc = proc
        self._last: dict[int, tuple[_StatLine, ProcessFacts]] = {}

    def read(self) -> dict[int, ProcessFacts]:
        """Everybody this PID namespace shows, by pid. Not one moment: processes come and go while it is read."""
        seen: dict[int, tuple[_StatLine, ProcessFacts]] = {}
        for pid in read_pids(self._proc):
            line = _stat_line(pid, self._proc)
            if line is None:
                continue
            last = self._last.get(pid)
            if last is None or last[0] != line or last[1].state in "ZX":  # there the threads say who lives
                last = (line, _parsed(line, pid, self._boot_id, self._proc))
            seen[pid] = last
        self._last = seen
        return {pid: facts for pid, (_, facts) in seen.items()}


def read_processes(boot_id: str, proc: Path = PROC) -> dict[int, ProcessFacts]:
    """Everybody, once."""
    return ProcessTable(boot_id, proc).read()


_StatLine = tuple[bytes, int]  # and the user's number, which is the owner of the file


def _stat_line(pid: int, proc: Path) -> _StatLine | None:
    try:  # text instead of Paths, and one read: done a thousand times, it is what a look at a box costs
        descriptor = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, _STAT_BYTES), os.fstat(descriptor).st_uid
        finally:
            os.close(descriptor)
    except _VANISHED:
        return None


def _parsed(line: _StatLine, pid: int, boot_id: str, proc: Path) -> ProcessFacts:
    text = line[0].decode(errors="replace")
    state = text[text.rindex(")") + 2]
    living = _living_tasks(proc / str(pid)) if state in "ZX" else 1
    return parse_stat(text, uid=line[1], boot_id=boot_id, living_tasks=living)


def read_pids(proc: Path = PROC) -> list[int]:
    """Which pids are taken now: a hundredth of what it costs to look at all of them."""
    return [int(name) for name in os.listdir(proc) if name.isdigit()]  # noqa: PTH208 - half the time of pathlib


def read_cookie(pid: int, proc: Path = PROC) -> str | None:
    """The run's secret in the environment that the process was started with.

    None where there is none, where the process is another user's, where it has overwritten its environment
    (setproctitle does, unless ``SPT_NOENV=1`` was set), and for the moment of an exec in which the kernel has not
    laid the new environment out yet: who sees nobody looks again.
    """
    prefix = COOKIE_VARIABLE.encode() + b"="
    try:
        environment = _read(f"{proc}/{pid}/environ")
    except (*_VANISHED, PermissionError, OSError):
        return None
    for entry in environment.split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode(errors="replace")
    return None


def read_command(pid: int, proc: Path = PROC) -> tuple[str, ...]:
    """argv as the process shows it now (it may have renamed itself); empty for a zombie or kernel thread."""
    try:
        raw = (proc / str(pid) / "cmdline").read_bytes()
    except (*_VANISHED, PermissionError):
        return ()
    return tuple(part.decode(errors="replace") for part in raw.rstrip(b"\0").split(b"\0") if part)


def read_kernel_wait(pid: int, proc: Path = PROC) -> str:
    """``/proc/PID/wchan``; "unknown" where the kernel does not say (0, or not ours to see)."""
    try:
        text = (proc / str(pid) / "wchan").read_text().strip()
    except OSError:
        return "unknown"
    return text if text not in ("", "0") else "unknown"


def redacted(argv: tuple[str, ...], limit: int = 120) -> str:
    """argv for a record: values that follow a name like ``--api-key`` are masked, the length is bounded."""
    shown: list[str] = []
    mask_next = False
    for word in argv:
        name, equals, _ = word.partition("=")
        secret = name.startswith("-") and any(part in name.lower() for part in _SECRET_WORDS)
        shown.append("***" if mask_next else f"{name}=***" if secret and equals else word)
        mask_next = secret and not equals
    text = " ".join(" ".join(shown).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def read_open_paths(
    pid: int, proc: Path = PROC, *, prefixes: tuple[str, ...] = ("",)
) -> tuple[OpenPath, ...]:
    """What a process has open or mapped, of the paths that start with one of the prefixes.

    ``/proc/PID/fd`` is asked first. It is empty when the main thread has ended, and then every thread's own
    ``task/TID/fd`` is read; doing so always would cost (threads x descriptors) for a server with hundreds of both.
    Other users' processes answer with nothing unless we are root.
    """
    folder = proc / str(pid)
    found = list(_descriptors(folder, prefixes))
    found.extend(_mappings(folder, prefixes))
    if not found and not _names(folder / "fd"):
        for task in _names(folder / "task"):
            found.extend(_descriptors(folder / "task" / task, prefixes))
            found.extend(_mappings(folder / "task" / task, prefixes))
    return tuple(dict.fromkeys(found))


def _read(path: str) -> bytes:
    """A whole file of /proc; a quarter of the time of ``Path.read_bytes``, which matters a thousand times over."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    finally:
        os.close(descriptor)
    return b"".join(parts)


def _living_tasks(folder: Path) -> int:
    living = 0
    for task in _names(folder / "task"):
        try:
            text = (folder / "task" / task / "stat").read_text(errors="replace")
        except _VANISHED:
            continue
        living += text[text.rindex(")") + 2] not in "ZX"
    return living


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208
    except (*_VANISHED, PermissionError):
        return []


def _descriptors(folder: Path, prefixes: tuple[str, ...]) -> Iterator[OpenPath]:
    base = str(folder)  # text, since joining Paths costs more than the system calls do
    for number in _names(folder / "fd"):
        try:
            target = os.readlink(f"{base}/fd/{number}")  # noqa: PTH115 - the kernel's text, not a path
            if not target.startswith(prefixes):
                continue
            writable = target.startswith("/") and _is_writable(folder / "fdinfo" / number)
        except OSError:
            continue
        yield OpenPath(target, writable=writable, mapped=False)


def _is_writable(fdinfo: Path) -> bool:
    for line in fdinfo.read_text().splitlines():
        if line.startswith("flags:"):
            return int(line.split()[1], 8) & O_ACCMODE != os.O_RDONLY
    return False


def _mappings(folder: Path, prefixes: tuple[str, ...]) -> Iterator[OpenPath]:
    """Mapped files under /dev only (segments and devices): libraries are no evidence and there are hundreds."""
    try:
        raw = (folder / "maps").read_bytes()
    except OSError:
        return
    if b" /dev/" not in raw:
        return
    for line in raw.decode(errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/dev/") and fields[5].startswith(prefixes):
            shared_writable = "w" in fields[1] and "s" in fields[1]
            yield OpenPath(fields[5], writable=shared_writable, mapped=True, inode=int(fields[4]))
