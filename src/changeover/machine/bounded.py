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


def run_bounded(
    argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str], stdin: str = ""
) -> BoundedResult:
    """Run a program of our own to its end or to the deadline; never raises for what the program does.

    The child gets no cookie (it is no part of a run's servers) and nothing but ``stdin`` to read.
    """
    environment = {name: value for name, value in env.items() if name != COOKIE_VARIABLE}
    try:
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return BoundedResult(Answer.FAILED, "", f"could not start {argv[0]}: {error}")
    try:
        output, errors = child.communicate(stdin, timeout=max(timeout_s, 0.01))
    except subprocess.TimeoutExpired:
        return _end(child, timeout_s)
    if child.returncode != 0:
        return BoundedResult(
            Answer.FAILED, output, f"exit {child.returncode}: {errors.strip()[-_NOTE_CHARS:]}"
        )
    return BoundedResult(Answer.GIVEN, output, "")


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


def probe_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our own environment with ``env`` added: the child imports us from where we were imported, with no cookie."""
    home = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, **(env or {})}
    environment.pop(COOKIE_VARIABLE, None)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (home, environment.get("PYTHONPATH"))))
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
