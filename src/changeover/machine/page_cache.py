"""Files in the kernel's page cache: how much of them is there, how much more has room, and reading them in.

Looking does no I/O: ``mincore(2)`` on a mapping that is never touched. (``preadv2`` with ``RWF_NOWAIT`` starts a
readahead since Linux 6.) It tells the truth only of a file that one owns or may write; of any other it calls every
page resident (``can_do_mincore`` in mm/mincore.c), so that is not asked.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 8 * 2**20
RESERVE_SHARE = 0.1
"""Of the memory, left alone: what runs now comes first."""
_LOOKS_PER_FILE = 512
_THREADS = 4  # a network disk or an NVMe answers several questions in the time of one
_PAGE = mmap.PAGESIZE
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class Cached:
    """``cached_bytes`` of ``bytes`` are in memory; None where the kernel does not say."""

    bytes: int
    cached_bytes: int | None


def look(files: Sequence[Path]) -> Cached:
    """How much of these files is cached, from one page in each 2 MiB, or 512 in a larger file; a missing file counts
    nothing.
    """
    total = 0
    cached: int | None = 0
    for file in files:
        try:
            with _opened(file) as (fd, size), _residence(fd, size) as is_cached:
                step = max(2 * 2**20, size // _LOOKS_PER_FILE // _PAGE * _PAGE)
                looked = [is_cached(offset) for offset in range(0, size, step)] if is_cached else None
        except OSError:
            continue
        total += size
        if looked is None:
            cached = None
        elif cached is not None and looked:
            cached += round(size * sum(looked) / len(looked))
    return Cached(total, cached)


def read_in(files: Sequence[Path], room_bytes: int, between: Callable[[int], None] = lambda _: None) -> int:
    """Read what is not cached of these files, in their order, as long as whole files fit into ``room_bytes``.

    Returns the bytes read; ``between`` is told them after each round of chunks. A file that cannot be read is left to
    whoever needs it, who will say so better.
    """
    read = 0
    with ThreadPoolExecutor(_THREADS) as pool:
        for file in files:
            try:
                with _opened(file) as (fd, size), _residence(fd, size) as is_cached:
                    room_bytes -= size
                    if room_bytes < 0:
                        break
                    for chunks in _rounds(size):
                        missing = [
                            one for one in chunks if is_cached is None or not _all_cached(is_cached, one)
                        ]
                        read += sum(pool.map(_read_chunk, [fd] * len(missing), missing))
                        between(read)
            except OSError:
                continue
    return read


def room_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """How much may be cached without pushing out what is in use: what is available, less a tenth of the memory.

    In a container the limit of its cgroup counts, where it is narrower (``memory.max``, kernel's
    Documentation/admin-guide/cgroup-v2.rst).
    """
    facts = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts[name] = int(value.split()[0]) * 1024
    room = facts["MemAvailable"] - int(RESERVE_SHARE * facts["MemTotal"])
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max" is no number
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return max(room, 0)
    free = limit - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    return max(min(room, free - int(RESERVE_SHARE * limit)), 0)


@contextmanager
def _opened(file: Path) -> Iterator[tuple[int, int]]:
    """A descriptor and the size."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no readahead: what is read is what was asked for
        yield fd, os.fstat(fd).st_size
    finally:
        os.close(fd)


@contextmanager
def _residence(fd: int, size: int) -> Iterator[Callable[[int], bool] | None]:
    """Whether the page at an offset is cached, as a question; None where the kernel would not answer truly."""
    status = os.fstat(fd)
    may_ask = os.geteuid() in (0, status.st_uid) or os.access(f"/proc/self/fd/{fd}", os.W_OK)
    if not may_ask or not size:
        yield None if size else lambda _: True
        return
    libc = _libc()
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address in (None, _MAP_FAILED):
        raise OSError(ctypes.get_errno(), "mmap")
    answer = ctypes.c_ubyte()

    def is_cached(offset: int) -> bool:
        if libc.mincore(address + offset // _PAGE * _PAGE, 1, ctypes.byref(answer)) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        return bool(answer.value & 1)

    try:
        yield is_cached
    finally:
        libc.munmap(address, size)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    libc.mmap.argtypes = [pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mmap.restype = pointer
    libc.munmap.argtypes = [pointer, size]
    libc.mincore.argtypes = [pointer, size, pointer]
    return libc


def _rounds(size: int) -> Iterator[list[range]]:
    """The chunks of a file, as many at a time as there are threads."""
    starts = range(0, size, CHUNK_BYTES)
    for at in range(0, len(starts), _THREADS):
        yield [range(start, min(start + CHUNK_BYTES, size)) for start in starts[at : at + _THREADS]]


def _all_cached(is_cached: Callable[[int], bool], chunk: range) -> bool:
    """Both ends and the middle: what the kernel drops, it drops in long runs."""
    return all(is_cached(at) for at in (chunk[0], chunk[len(chunk) // 2], chunk[-1]))


def _read_chunk(fd: int, chunk: range) -> int:
    return os.preadv(fd, [bytearray(len(chunk))], chunk.start)
