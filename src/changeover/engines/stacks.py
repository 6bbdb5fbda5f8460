"""What the processes of a stalled server are doing: the Python stack of each thread, by py-spy."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from changeover.machine.bounded import Answer, run_bounded
from changeover.machine.processes import ProcessFacts

TIMEOUT_S = 10.0
"""For one process. A stack of a hundred threads takes well under a second."""


def dump_stacks(processes: Iterable[ProcessFacts], timeout_s: float = TIMEOUT_S) -> str:
    """The stacks of these processes for a person to read; what cannot be read is said in its place. Never raises.

    ``--nonblocking`` reads without stopping the process by ptrace, so that a py-spy that is cut off leaves none
    stopped; nothing is lost by it, since what has stalled does not move. The kernel lets only root or, where
    ``kernel.yama.ptrace_scope`` is 0, the same user read another process.
    """
    program = _program()
    if program is None:
        return "no stacks: expected py-spy beside Python or on PATH; pip install py-spy\n"
    return "\n".join(_one(program, process, timeout_s) for process in processes)


def _one(program: str, process: ProcessFacts, timeout_s: float) -> str:
    pid = process.identity.pid
    result = run_bounded(
        [program, "dump", "--nonblocking", "--pid", str(pid)], timeout_s=timeout_s, env={"PATH": os.defpath}
    )
    head = f"--- pid {pid} {process.comm!r}, state {process.state}\n"
    if result.answer is Answer.GIVEN:
        return head + result.output
    return f"{head}no stack: {result.note}\n"


def _program() -> str | None:
    """That of our own environment, before any other."""
    beside = Path(sysconfig.get_path("scripts")) / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")
