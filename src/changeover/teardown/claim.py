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
from changeover.teardown.footprint import Baseline

_RETRY_S = 0.1


class MachineClaimed(ChangeoverError):  # noqa: N818
    """Another Changeover has the machine."""

    exit_code = 5


class MachineTaken(ChangeoverError):  # noqa: N818
    """Somebody has come between the clearance and the claim."""

    exit_code = 5


def expect_as_cleared(before: Baseline, now: Baseline, tolerance_mib: float) -> None:
    """The machine that a phase starts on is the one that the run began with, to which it was proven to have returned.

    Raises MachineTaken where a GPU holds more by now: its own server would fail for want of memory, or die while it
    profiles (vllm #56830), and a baseline taken now would call the stranger's memory clean for ever. Nothing is said
    of another boot's baseline, nor of GPUs that could not be read.
    """
    if before.boot_id != now.boot_id:
        return
    then = before.by_uuid()
    more = [
        f"{gpu.uuid}: {gpu.used_mib:.0f} MiB, {then[gpu.uuid].used_mib:.0f} at the start"
        + (f", processes {list(gpu.pids)}" if gpu.pids else "")
        for gpu in now.gpus
        if gpu.uuid in then and gpu.used_mib > then[gpu.uuid].used_mib + tolerance_mib
    ]
    if more:
        raise MachineTaken(
            expected="the GPUs as they were when this run began",
            seen="; ".join(more),
            todo="`changeover check` names who holds them; end that, then `changeover run --resume`.",
        )


def default_lock_path() -> Path:
    """Per user: ``/tmp/changeover-<uid>/machine.lock``, else in ``$CHANGEOVER_LOCK_DIR``.

    Not in ``$XDG_RUNTIME_DIR``: that is set for a login and not for cron, and each must find the other's lock.
    """
    chosen = os.environ.get("CHANGEOVER_LOCK_DIR")
    folder = Path(chosen) if chosen else Path(f"/tmp/changeover-{os.getuid()}")  # noqa: S108 - owner is checked
    return folder / "machine.lock"


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
            todo="Have its owner remove it, or set CHANGEOVER_LOCK_DIR to a folder of your own.",
        )
