"""A question asked in a child process with a deadline.

The driver of a sick GPU does not answer late, it does not answer at all: ``nvidia-smi`` itself hangs in
state D (leptonai/gpud #117). So nothing that enters a driver runs in Changeover's own process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from changeover.machine.processes import COOKIE_VARIABLE

_KILL_WAIT_S = 1.0
_NOTE_CHARS = 300


class Answer(StrEnum):
    """How a bounded question ended."""

    GIVEN = "given"
    FAILED = "failed"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class BoundedResult:
    """``stuck_pid`` is the child that not even SIGKILL ended in a second (state D in a driver)."""

    answer: Answer
    output: str
    note: str
    stuck_pid: int | None = None


class BoundedChild:
    """A program of our own that has been started, to be asked later; never raises for what the program does.

    It gets no cookie (it is no part of a run's servers), and its stdin is the only thing that it has to read: it must
    end by itself when that ends unanswered.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        environment = {name: value for name, value in env.items() if name != COOKIE_VARIABLE}
        self._argv = list(argv)
        self._error = ""
        self._child: subprocess.Popen[str] | None = None
        try:
            self._child = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                text=True,
                errors="replace",
            )
        except OSError as error:
            self._error = f"could not start {self._argv[0]}: {error}"

    def finish(self, stdin: str, timeout_s: float) -> BoundedResult:
        """Give it what it waits for, and wait for its end or for the deadline; once."""
        if self._child is None:
            return BoundedResult(Answer.FAILED, "", self._error)
        try:
            output, errors = self._child.communicate(stdin, timeout=max(timeout_s, 0.01))
        except subprocess.TimeoutExpired:
            return _end(self._child, timeout_s)
        if self._child.returncode != 0:
            note = f"exit {self._child.returncode}: {errors.strip()[-_NOTE_CHARS:]}"
            return BoundedResult(Answer.FAILED, output, note)
        return BoundedResult(Answer.GIVEN, output, "")

    def end(self) -> None:
        """It is not needed any more."""
        if self._child is not None:
            _end(self._child, 0.0)


def run_bounded(
    argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str], stdin: str = ""
) -> BoundedResult:
    """Run a program of our own to its end or to the deadline; never raises for what the program does."""
    return BoundedChild(argv, env).finish(stdin, timeout_s)


def begin_probe(module: str, *args: str, env: Mapping[str, str] | None = None) -> BoundedChild:
    """Start one of our own modules (``python -m module``), to be asked later."""
    return BoundedChild([sys.executable, "-m", module, *args], probe_environment(env))


def run_probe(
    module: str,
    *args: str,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    without: Collection[str] = (),
) -> BoundedResult:
    """Run one of our own modules as the child (``python -m module``), with ``env`` added and ``without`` left out."""
    environment = {name: value for name, value in probe_environment(env).items() if name not in without}
    return run_bounded([sys.executable, "-m", module, *args], timeout_s=timeout_s, env=environment)


def first_on_python_path(folder: str, environment: Mapping[str, str]) -> str:
    """A ``PYTHONPATH`` with this folder before what the environment has there."""
    return os.pathsep.join(filter(None, (folder, environment.get("PYTHONPATH"))))


def probe_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our own environment with ``env`` added: the child imports us from where we were imported, with no cookie."""
    home = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, **(env or {})}
    environment.pop(COOKIE_VARIABLE, None)
    environment["PYTHONPATH"] = first_on_python_path(home, environment)
    return environment


def _end(child: subprocess.Popen[str], timeout_s: float) -> BoundedResult:
    child.kill()  # our own unreaped child: the pid cannot be anybody else's
    note = f"no answer in {timeout_s:.1f} s"
    try:
        child.wait(timeout=_KILL_WAIT_S)
    except subprocess.TimeoutExpired:
        return BoundedResult(Answer.TIMEOUT, "", f"{note}; pid {child.pid} survives SIGKILL", child.pid)
    finally:
        for stream in (child.stdin, child.stdout, child.stderr):
            if stream is not None:
                stream.close()
    return BoundedResult(Answer.TIMEOUT, "", note)
