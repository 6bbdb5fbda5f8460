"""Processes in state D, for real: in a frozen cgroup (v1) SIGKILL stays pending, as it does below a stuck driver."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from changeover.machine.bounded import Answer, run_bounded
from changeover.machine.local import LocalMachine
from changeover.teardown.budgets import Budgets
from changeover.teardown.clear import clear
from changeover.teardown.clearance import Verdict
from changeover.teardown.footprint import take_baseline
from tests.machine import nasty
from tests.teardown.conftest import StartNasty

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a freezer needs root")
SHORT = Budgets(total_s=20.0, terminate_s=0.5, orphans_s=0.5, kill_s=2.0, ports_s=2.0)
HANGS = """
import os, sys, time
open(sys.argv[1] + "/tasks", "w").write(str(os.getpid()))
open(sys.argv[2], "w").write(str(os.getpid()))
time.sleep(3600)
"""


class Freezer:
    """One cgroup of the v1 freezer (Documentation/admin-guide/cgroup-v1/freezer-subsystem.rst)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def freeze(self, pid: int | None = None) -> None:
        if pid is not None:
            (self.path / "tasks").write_text(str(pid))
        self._set("FROZEN")

    def thaw(self) -> None:
        self._set("THAWED")

    def _set(self, state: str) -> None:
        (self.path / "freezer.state").write_text(state)
        until_s = time.monotonic() + 10.0
        while (self.path / "freezer.state").read_text().strip() != state:
            assert time.monotonic() < until_s, f"the freezer does not come to {state}"
            time.sleep(0.01)


@pytest.fixture
def freezer(tmp_path: Path) -> Iterator[Freezer]:
    mount = tmp_path / "freezer"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "cgroup", "-o", "freezer", "none", str(mount)], capture_output=True, text=True
    )
    if done.returncode != 0:
        reason = f"this kernel offers no freezer of cgroup v1: {done.stderr}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    one = Freezer(mount / f"changeover-{os.getpid()}")
    yield one
    one.thaw()
    until_s = time.monotonic() + 10.0
    while (one.path / "tasks").read_text():
        for pid in (one.path / "tasks").read_text().split():
            subprocess.run(["kill", "-9", pid], check=False, stderr=subprocess.DEVNULL)
        assert time.monotonic() < until_s, "what was frozen does not end"
        time.sleep(0.02)
    one.path.rmdir()
    subprocess.run(["umount", str(mount)], check=True)


def test_unsloth_3331_a_server_that_sigkill_does_not_end_is_unkillable_in_time_and_says_where_it_waits(
    machine: LocalMachine, start_nasty: StartNasty, freezer: Freezer
) -> None:
    """unslothai/unsloth #3331. And once the kernel lets it go, the same order ends clean."""
    baseline = take_baseline(machine)
    one = start_nasty("willing")
    freezer.freeze(one.pid)
    target = one.owned.target("server")
    clearance = clear(machine, [target], baseline, budgets=SHORT)
    assert clearance.verdict is Verdict.UNKILLABLE and clearance.exit_code == 3
    assert clearance.seconds < SHORT.total_s
    (said,) = [each for each in clearance.evidence if each.item == "processes"]
    assert f"pid {one.pid}" in said.seen and "in state D" in said.seen
    assert "survives SIGKILL, waits in" in said.seen
    assert [each.signal for each in clearance.signals] == ["SIGTERM", "SIGCONT", "SIGKILL"]
    freezer.thaw()
    again = clear(machine, [target], baseline, budgets=SHORT)
    assert again.verdict is Verdict.CLEAN and not nasty.alive(one.pid)


def test_moby_22802_a_probe_that_sigkill_does_not_end_is_left_behind_and_named(
    tmp_path: Path, freezer: Freezer
) -> None:
    """moby/moby #22802, #37886: whoever waits for a process in state D waits for ever."""
    ready = tmp_path / "ready"

    def freeze_when_it_is_there() -> None:
        until_s = time.monotonic() + 20.0
        while not (ready.exists() and ready.read_text()) and time.monotonic() < until_s:
            time.sleep(0.01)
        freezer.freeze()

    thread = threading.Thread(target=freeze_when_it_is_there)
    thread.start()
    started_s = time.monotonic()
    asked = [sys.executable, "-S", "-c", HANGS, str(freezer.path), str(ready)]
    result = run_bounded(asked, timeout_s=3.0, env=dict(os.environ))
    thread.join()
    assert time.monotonic() - started_s < 8.0
    assert result.answer is Answer.TIMEOUT and result.stuck_pid == int(ready.read_text())
    assert "survives SIGKILL" in result.note
    freezer.thaw()
    os.waitpid(result.stuck_pid, 0)
