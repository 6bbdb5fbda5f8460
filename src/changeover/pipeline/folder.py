"""Where a run keeps its files (docs/design.md, "A run on disk"), its lock and its secret."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from changeover.machine.errors import ChangeoverError, InvalidInput

_LOCK_TRIES = 5
_LOCK_RETRY_S = 0.05


class RunBusy(ChangeoverError):  # noqa: N818
    """Another Changeover works on this run now."""

    exit_code = 2


@dataclass(frozen=True)
class RunFolder:
    """One run's folder. Everything below it is this run's own."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def description(self) -> Path:
        return self.path / "run.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def phase(self, index: int, name: str) -> Path:
        return self.path / "phases" / f"{index + 1:02d}-{name}"

    def server(self, index: int, phase: str) -> Path:
        return self.phase(index, phase) / "server"

    def job(self, index: int, phase: str, job: str) -> Path:
        return self.phase(index, phase) / "jobs" / job

    def secret(self) -> str:
        """The run's secret; made with mode 0600 when first asked for, never again once the run has a journal.

        Raises InvalidInput where a run has lost it: another one would prove nothing, and find nobody who is ours.
        """
        path = self.path / "secret"
        if self.journal.exists() and not (path.is_file() and path.stat().st_size):
            raise InvalidInput(
                expected=f"the run's secret in {path}, which its processes carry",
                seen="no such file, or an empty one",
                todo="Put it back (a copy of a run needs it too), or stop the processes by hand: `changeover check` "
                "names what holds the machine.",
            )
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return path.read_text()
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(16))
            file.flush()
            os.fsync(file.fileno())
        return path.read_text()

    def cookie(self, phase: str, process: str) -> str:
        """What marks one server's or job's process tree: of this run, this phase, this process and no other.

        Derived, so that a resumed run knows the cookies of processes whose start it never wrote down.
        """
        return hashlib.sha256(f"{self.secret()}/{phase}/{process}".encode()).hexdigest()[:32]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run's lock; raises :class:`RunBusy` where somebody else holds it. Ends with the process."""
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not _lock(fd):
                holder = os.pread(fd, 64, 0).decode(errors="replace").strip()
                raise RunBusy(
                    expected=f"nobody at work on run {self.run_id}",
                    seen=f"its lock is held (pid {holder or 'unknown'})",
                    todo=f"Follow it with `changeover attach {self.run_id}`, or end it with "
                    f"`changeover stop {self.run_id}`.",
                )
            # over the old one, never cut first: that needs no new block on a full disk, and nobody reads an empty file
            os.pwrite(fd, f"{os.getpid():<10}\n".encode(), 0)
            yield
        finally:
            os.close(fd)

    def runner_pid(self) -> int | None:
        """Pid of the Changeover that works on this run, or None where nobody does."""
        try:
            fd = os.open(self.path / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(os.pread(fd, 64, 0) or 0) or None
        finally:
            os.close(fd)
        return None


def _lock(fd: int) -> bool:
    """Whether the lock is ours now; tried for a moment, since whoever asks for the runner's pid takes it for one."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_RETRY_S)
        else:
            return True
    return False


def create_run(runs_dir: Path, name: str) -> RunFolder:
    """A new folder ``<name>-<UTC time>`` (with a number behind it where that is taken)."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    runs_dir.mkdir(parents=True, exist_ok=True)
    for attempt in range(100):
        path = runs_dir / (f"{name}-{stamp}" + (f"-{attempt}" if attempt else ""))
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return RunFolder(path.resolve())
    raise ChangeoverError(
        expected=f"a free folder name {name}-{stamp} in {runs_dir}",
        seen="a hundred of them taken",
        todo="Give another --runs-dir.",
    )


def list_runs(runs_dir: Path) -> list[RunFolder]:
    """All runs, the newest last."""
    if not runs_dir.is_dir():
        return []
    found = [RunFolder(path.resolve()) for path in runs_dir.iterdir() if (path / "journal.jsonl").is_file()]
    return sorted(found, key=lambda run: run.journal.stat().st_mtime)


def find_run(reference: str | None, runs_dir: Path) -> RunFolder:
    """A run by its id or its folder; None is the newest. Raises :class:`InvalidInput` that lists what there is."""
    if reference is not None and (Path(reference) / "journal.jsonl").is_file():
        return RunFolder(Path(reference).resolve())
    runs = list_runs(runs_dir)
    if reference is None and runs:
        return runs[-1]
    for run in runs:
        if run.run_id == reference:
            return run
    known = ", ".join(run.run_id for run in runs[-5:]) or "none"
    raise InvalidInput(
        expected=f"a run in {runs_dir}: {known}",
        seen="no run" if reference is None else reference,
        todo="Name a run by its id or its folder, or give --runs-dir.",
    )


def newest_run_of(name: str, runs_dir: Path) -> RunFolder:
    """The newest run of the pipeline of that name. Raises :class:`InvalidInput` where there is none."""
    for run in reversed(list_runs(runs_dir)):
        try:
            if json.loads(run.description.read_text())["name"] == name:
                return run
        except (OSError, ValueError, KeyError):  # killed before it was written: nothing to go on with
            continue
    raise InvalidInput(
        expected=f"a run of pipeline `{name}` in {runs_dir}",
        seen="none",
        todo="Start one without --resume, or name a run by its id or its folder.",
    )
