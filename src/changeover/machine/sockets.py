"""Unix sockets that have a file: engines leave them behind in ``/tmp`` (vLLM seven or eight a run).

``/proc/net/unix`` gives the path that a socket was bound to and the socket's own inode, by which its owner is found
(``socket:[inode]`` among his descriptors); the file has another inode, which tells it from a successor of its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from changeover.machine.processes import PROC


@dataclass(frozen=True, order=True)
class SocketFile:
    """The file of a unix socket, by path and inode of the file."""

    path: str
    inode: int

    def to_json(self) -> dict[str, str | int]:
        return {"path": self.path, "inode": self.inode}


@dataclass(frozen=True)
class UnixSocket:
    """A bound unix socket; whoever has ``socket:[inode]`` open owns it."""

    inode: int
    file: SocketFile


def read_sockets(proc: Path = PROC) -> tuple[UnixSocket, ...]:
    """Every bound unix socket of this network namespace whose file is still there."""
    found = []
    for line in (proc / "net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) < 8 or not fields[7].startswith("/"):  # unnamed, or in the abstract namespace ("@...")
            continue
        try:
            file_inode = Path(fields[7]).lstat().st_ino
        except OSError:
            continue
        found.append(UnixSocket(int(fields[6]), SocketFile(fields[7], file_inode)))
    return tuple(found)


def unlink_socket(file: SocketFile) -> bool:
    """Remove a socket's file if the name still means the same file; False where it does not. Ownership is the
    caller's.
    """
    path = Path(file.path)
    try:
        if path.lstat().st_ino != file.inode or not path.is_socket():
            return False
        path.unlink()
    except OSError:
        return False
    return True
