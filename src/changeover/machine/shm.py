"""Shared memory by looking only: ``stat``, never an attach.

Attaching to a segment and ending unlinks it for its owner on Python 3.11 (cpython #104291, #82300), and a
failed attach does too (#153279).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from changeover.machine.processes import OpenPath

SHM_ROOT = Path("/dev/shm")  # noqa: S108 - looked at, never written to


@dataclass(frozen=True, order=True)
class Segment:
    """A file below ``/dev/shm``. The inode tells a segment from its successor of the same name."""

    path: str
    inode: int

    def to_json(self) -> dict[str, str | int]:
        return {"path": self.path, "inode": self.inode}


def free_mib(root: Path = SHM_ROOT) -> float:
    """What may still be written there; a segment larger than this ends its writer by SIGBUS, or by an error late in a
    load."""
    status = os.statvfs(root)
    return status.f_bavail * status.f_frsize / 2**20


def is_segment(held: OpenPath, segment: Segment) -> bool:
    """Whether that is it: by name, or mapped under a name that it has no more."""
    mapped = held.mapped and held.path.startswith(f"{Path(segment.path).parent}/")
    return held.path == segment.path or (mapped and held.inode == segment.inode)


@dataclass(frozen=True)
class SegmentFacts:
    segment: Segment
    used_mib: float
    uid: int


def read_segments(root: Path = SHM_ROOT) -> dict[Segment, SegmentFacts]:
    """Every file below the root, by what was there when it was looked at."""
    return {facts.segment: facts for facts in _walk(root)}


def unlink_segment(segment: Segment) -> bool:
    """Remove a segment if the name still means the same file; False where it does not. Ownership is the
    caller's.
    """
    try:
        if Path(segment.path).lstat().st_ino != segment.inode:
            return False
        Path(segment.path).unlink()
    except FileNotFoundError:
        return False
    return True


def _walk(folder: Path) -> Iterator[SegmentFacts]:
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path))
                continue
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        yield SegmentFacts(Segment(entry.path, status.st_ino), status.st_blocks * 512 / 2**20, status.st_uid)
