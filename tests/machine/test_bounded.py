"""Questions with a deadline."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from changeover.machine.bounded import Answer, run_bounded, run_probe

HANGS = """
import os, signal, sys, time
signal.signal(15, signal.SIG_IGN)
print(os.getpid(), file=open(sys.argv[1], "w"), flush=True)
time.sleep(3600)
"""
HANGS_WITH_A_CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(15)"])
time.sleep(60)
"""


def ask(code: str, *args: str, timeout_s: float = 30.0):  # type: ignore[no-untyped-def]
    return run_bounded([sys.executable, "-c", code, *args], timeout_s=timeout_s, env=dict(os.environ))


def test_an_answer() -> None:
    assert ask("print('yes')").output == "yes\n"


def test_a_failure_says_why() -> None:
    result = ask("import sys; sys.exit('no driver')")
    assert result.answer is Answer.FAILED and "no driver" in result.note


def test_a_program_that_does_not_exist() -> None:
    result = run_bounded(["/nowhere/nvidia-smi"], timeout_s=1.0, env={})
    assert result.answer is Answer.FAILED and "/nowhere/nvidia-smi" in result.note


def test_gpud_117_a_probe_that_hangs_and_ignores_sigterm_is_ended_and_leaves_no_child(tmp_path: Path) -> None:
    """leptonai/gpud #117: nvidia-smi itself stuck after Xid 45."""
    pid_file = tmp_path / "pid"
    started_s = time.monotonic()
    result = ask(HANGS, str(pid_file), timeout_s=3.0)
    assert (
        result.answer is Answer.TIMEOUT and "no answer in 3.0 s" in result.note and result.stuck_pid is None
    )
    assert time.monotonic() - started_s < 10.0
    assert not Path(f"/proc/{pid_file.read_text().strip()}").exists()


def test_gpustat_70_a_grandchild_that_keeps_the_pipe_does_not_hold_us_up() -> None:
    """wookayin/gpustat #70: what a hanging probe has started may outlive it."""
    started_s = time.monotonic()
    assert ask(HANGS_WITH_A_CHILD, timeout_s=1.0).answer is Answer.TIMEOUT
    assert time.monotonic() - started_s < 10.0


def test_a_probe_carries_no_cookie(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """A probe of a Changeover that was itself started by a run must not be taken for that run's server."""
    monkeypatch.setenv("CHANGEOVER_COOKIE", "an outer run's")
    assert ask("import os; print(os.environ.get('CHANGEOVER_COOKIE'))").output == "None\n"


def test_our_own_modules_are_found_by_the_child() -> None:
    result = run_probe("changeover", timeout_s=60.0, env={"COLUMNS": "200"})
    assert result.answer in (Answer.GIVEN, Answer.FAILED) and "No module named" not in result.note
