"""Files that survive a crash: all bytes written, synced, renamed, and the folder synced too."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Linux takes at most this many buffers in one pwritev (IOV_MAX).
_BUFFERS_PER_CALL = 1024


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable (a rename alone may be lost at power loss)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
    """Write every byte of ``buffers`` from file position ``offset``; returns the position after the last
    byte.

    A short write goes on where it stopped. Raises OSError (ENOSPC ...) with an unknown part written.
    """
    pending = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
    while pending:
        written = os.pwritev(fd, pending[:_BUFFERS_PER_CALL], offset)
        offset += written
        while pending and written >= pending[0].nbytes:
            written -= pending.pop(0).nbytes
        if written:
            pending[0] = pending[0][written:]
    return offset


def read_exactly(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill ``buffer`` from file position ``offset``; returns the bytes read, fewer only at the end of the
    file.
    """
    done = 0
    while done < buffer.nbytes:
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def replace_file(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path`` so that a crash leaves either the old file or the new one, whole."""
    temporary = path.with_name(f".{path.name}.partial")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, [content], 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)
    sync_folder(path.parent)


def replace_json(path: Path, value: Mapping[str, Any]) -> None:
    replace_file(path, (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())


def append_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Append whole lines and sync them; on an error the file is cut back to the length that it had."""
    is_new = not path.exists()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        before = os.fstat(fd).st_size
        try:
            write_all(fd, [b"".join(lines)], before)
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, before)
            raise
    finally:
        os.close(fd)
    if is_new:
        sync_folder(path.parent)
