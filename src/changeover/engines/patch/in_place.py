"""The patch in the installed files themselves, and back: whole at every instant, whoever is killed.

Beside each patched file lies what it was (``NAME.changeover-original``), made before the file is touched. A file is
never written into, always replaced by a rename: an installer's cache may share its inode (uv links files from there).
After ``kill -9`` at any point the same command again, or the other one, comes to its end.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from changeover.engines.patch.installed import Installed, ModelFile, holders, model_files, state_of
from changeover.engines.patch.source import SourceState, original, patched
from changeover.machine.clock import Clock
from changeover.machine.durable import sync_folder
from changeover.machine.errors import ChangeoverError, InvalidInput
from changeover.machine.record import Record

BACKUP = ".changeover-original"
PARTIAL = ".changeover-partial"
_NEVER_PATCHED = (SourceState.ORIGINAL, SourceState.UNKNOWN)


@dataclass(frozen=True)
class Change:
    """What one file is now, and ``note``: what was done with it, or why nothing was."""

    name: str
    state: SourceState
    note: str


class PackageInUse(ChangeoverError):  # noqa: N818
    """Somebody has the package loaded, or is patching it."""

    exit_code = 5


def apply_in_place(
    installed: Installed,
    journal: Path,
    clock: Clock,
    *,
    look: Callable[[Installed], list[str]] | None = None,
) -> list[Change]:
    """Patch every file that the patch knows. Raises PackageInUse, and InvalidInput where we may not write there.

    ``look``: who has the package loaded; :func:`holders` by default.
    """
    return _each(installed, journal, clock, look, _patch)


def restore_in_place(
    installed: Installed,
    journal: Path,
    clock: Clock,
    *,
    look: Callable[[Installed], list[str]] | None = None,
) -> list[Change]:
    """Bring back every file that is patched, byte for byte, proven by the hash that the patch noted in it.

    A file that was edited since is left as it is, and said. Where nothing is left of a patch nothing is asked for
    either: no right to write, no lock, nobody's leave. Raises as :func:`apply_in_place`.
    """
    files = model_files(installed)
    begun = any(it.state not in _NEVER_PATCHED or backup_of(it.path).exists() for it in files)
    if not begun and not _partials(installed):
        return [Change(it.name, it.state, "is as it was") for it in files]
    return _each(installed, journal, clock, look, _restore)


def _each(
    installed: Installed,
    journal: Path,
    clock: Clock,
    look: Callable[[Installed], list[str]] | None,
    change: Callable[[ModelFile, Record], Change],
) -> list[Change]:
    with _alone(installed), _record(journal, clock) as record:
        holding = (look or _who_holds)(installed)
        if holding:
            raise PackageInUse(
                expected=f"no process that has SGLang of {installed.package} loaded",
                seen="; ".join(holding),
                todo="End it first (`changeover clear --pid N` shows its whole tree and asks), or leave the installed "
                "files alone: without --in-place a copy is made beside them.",
            )
        for left in _partials(installed):
            left.unlink()
        return [change(it, record) for it in model_files(installed)]


def _partials(installed: Installed) -> list[Path]:
    """Left by a change that was killed."""
    return list(installed.models.glob(f"*{PARTIAL}"))


def _who_holds(installed: Installed) -> list[str]:
    return holders(installed.roots)


@contextmanager
def _alone(installed: Installed) -> Iterator[None]:
    """The folder's own lock: a file for it would be one more thing left in the package."""
    folder = os.open(installed.models, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not os.access(installed.models, os.W_OK):
            raise InvalidInput(
                expected=f"a folder that we may write to: {installed.models}",
                seen="none",
                todo="Run this as its owner, or without --in-place: the copy beside needs no rights there.",
            )
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PackageInUse(
                expected=f"to be alone in {installed.models}",
                seen="another `changeover patch`",
                todo="Wait until it has ended.",
            ) from None
        yield
    finally:
        os.close(folder)


@contextmanager
def _record(path: Path, clock: Clock) -> Iterator[Record]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    record = Record(path, clock)
    try:
        yield record
    finally:
        record.close()


def _patch(it: ModelFile, record: Record) -> Change:
    if it.state is not SourceState.ORIGINAL:
        note = "was already" if it.state is SourceState.PATCHED else "left alone"
        return Change(it.name, it.state, note)
    content = it.path.read_bytes()
    whole = patched(content.decode()).encode()
    backup = backup_of(it.path)
    if backup.exists() and backup.read_bytes() != content:
        # of a SGLang that was installed over in the meantime; nothing needs it any more, and it is not ours to judge
        return Change(it.name, it.state, f"left alone: {backup.name} is of another version; remove it")
    record.append("patch.begin", file=str(it.path), before=_sha256(content), after=_sha256(whole))
    if not backup.exists():
        _replace(backup, content, like=it.path)
    _replace(it.path, whole, like=it.path)
    _forget_compiled(it.path)
    record.append("patch.done", file=str(it.path))
    return Change(it.name, state_of(it.path.read_bytes()), "patched")


def _restore(it: ModelFile, record: Record) -> Change:
    backup = backup_of(it.path)
    content = it.path.read_bytes()
    if it.state is SourceState.ORIGINAL and backup.exists():
        return _drop_backup(it, content, backup)
    if it.state is not SourceState.PATCHED:
        note = "is as it was" if it.state in _NEVER_PATCHED else "left alone"
        if it.state is SourceState.EDITED and backup.exists():
            note = f"left alone; as it was before both: {backup.name}"
        return Change(it.name, it.state, note)
    whole = original(content.decode()).encode()
    record.append("restore.begin", file=str(it.path), before=_sha256(content), after=_sha256(whole))
    if backup.exists() and backup.read_bytes() == whole:
        backup.replace(it.path)  # brings its times back too
        sync_folder(it.path.parent)
    else:
        _replace(it.path, whole, like=it.path)
    _forget_compiled(it.path)
    record.append("restore.done", file=str(it.path))
    return Change(it.name, state_of(it.path.read_bytes()), "restored")


def _drop_backup(it: ModelFile, content: bytes, backup: Path) -> Change:
    """The file is no patched one: apply was killed before it, or somebody has installed over it."""
    if backup.read_bytes() != content:
        return Change(it.name, it.state, f"left alone, and so is {backup.name}, which is of another version")
    backup.unlink()
    sync_folder(it.path.parent)
    return Change(it.name, it.state, "is as it was; its copy is removed")


def backup_of(path: Path) -> Path:
    return path.with_name(path.name + BACKUP)


def _replace(path: Path, content: bytes, *, like: Path) -> None:
    """By rename, with the mode, the owner and, for a copy of ``like``, its times."""
    facts = like.stat()
    same = content == like.read_bytes()
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    if same:
        shutil.copystat(like, partial)
    else:
        partial.chmod(facts.st_mode & 0o7777)
    if os.geteuid() == 0:
        os.chown(partial, facts.st_uid, facts.st_gid)
    partial.replace(path)
    sync_folder(path.parent)


def _forget_compiled(path: Path) -> None:
    """Python compares seconds and sizes alone: a restore within the same second could leave the patched bytecode."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
