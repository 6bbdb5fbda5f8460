"""The machine's lock: from before the verification until the next server is started.

"Verified" and "started" are two moments; between them somebody else may come (llm-d-fast-model-actuation
#720). The kernel drops the lock with its holder, so that a crash never leaves it behind.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from changeover.machine.clock import Clock, SystemClock
from changeover.machine.errors import ChangeoverError, InvalidInput

_RETRY_S = 0.1


class MachineClaimed(ChangeoverError):  # noqa: N818
    """Another Changeover has the machine."""

    exit_code = 5


def default_lock_path() -> Path:
    """Per user: ``$XDG_RUNTIME_DIR/changeover/machine.lock``, else below ``/tmp/changeover-<uid>``."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "changeover" / "machine.lock"
    return Path(f"/tmp/changeover-{os.getuid()}") / "machine.lock"  # noqa: S108 - owner and mode are checked


@contextmanager
def claim(
    holder: str, *, path: Path | None = None, timeout_s: float = 0.0, clock: Clock | None = None
) -> Iterator[Path]:
    """Hold the machine; ``holder`` is written into the file for whoever comes second.

    Raises MachineClaimed where another process has it for longer than ``timeout_s``, InvalidInput where the
    folder is somebody else's. Children do not inherit it.
    """
    path = path or default_lock_path()
    clock = clock or SystemClock()
    _own_folder(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock(descriptor, path, clock, timeout_s)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()}: {holder}\n".encode(), 0)
        yield path
    finally:
        # Said explicitly: a child that is just being started shares the descriptor until its exec is over.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lock(descriptor: int, path: Path, clock: Clock, timeout_s: float) -> None:
    until_s = clock.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if clock.monotonic() >= until_s:
                who = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "an unnamed process"
                raise MachineClaimed(
                    expected="this machine to be free for a changeover",
                    seen=f"{path} is held by {who}",
                    todo="Wait for that run to end, or stop it (`changeover stop`).",
                ) from None
            clock.sleep(_RETRY_S)
        else:
            return


def _own_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid():
        raise InvalidInput(
            expected=f"{folder} to be a folder of our own",
            seen=f"it belongs to uid {status.st_uid}" + (" through a link" if folder.is_symlink() else ""),
            todo="Set XDG_RUNTIME_DIR to a folder of your own.",
        )
