"""Real cgroups (v2), wherever this machine lets us write them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from changeover.machine import cgroups
from changeover.machine.local import LocalMachine
from changeover.teardown.budgets import Budgets
from changeover.teardown.clear import clear
from changeover.teardown.clearance import Verdict
from changeover.teardown.footprint import Target, take_baseline
from changeover.teardown.launch import cgroup_name, launch

ESCAPES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-S", "-c",
            f"import os, time; open({sys.argv[1]!r} + '.part', 'w').write(str(os.getpid()));"
            f"os.rename({sys.argv[1]!r} + '.part', {sys.argv[1]!r}); time.sleep(600)"], {})
    os._exit(0)
time.sleep(600)
"""


@pytest.fixture
def cgroup() -> Iterator[str]:
    path = LocalMachine().make_cgroup(f"changeover-test-{os.getpid()}-{time.monotonic_ns()}")
    if path is None:
        here = cgroups.own_cgroup()
        if here is not None and os.access(here, os.W_OK) and not os.statvfs(here).f_flag & os.ST_RDONLY:
            pytest.fail(f"{here} can be written, and no cgroup was made")
        pytest.skip("no cgroup v2 that can be written here")
    yield path
    cgroups.kill(path)
    until_s = time.monotonic() + 10.0
    while cgroups.is_populated(path) and time.monotonic() < until_s:
        time.sleep(0.01)
    cgroups.remove(path)


def escaped(machine: LocalMachine, folder: Path, cgroup: str | None) -> tuple[Target, int]:
    """A server whose worker has left its parent, its session and its environment before anybody looked."""
    ready = folder / "escaped"
    argv = [sys.executable, "-S", "-c", ESCAPES, str(ready)]
    owned = launch(
        machine, argv=argv, env={}, cwd=folder, log=folder / "log", cookie="a secret", cgroup=cgroup
    )
    until_s = time.monotonic() + 30.0
    while not ready.exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    return owned.target("server"), int(ready.read_text())


def test_a_worker_that_left_everything_but_the_cgroup_is_ours(cgroup: str, tmp_path: Path) -> None:
    """sgl-project/sglang #23627: reparented workers survived the job with 100 GB each."""
    machine = LocalMachine()
    baseline = take_baseline(machine)
    target, worker = escaped(machine, tmp_path, cgroup)
    clearance = clear(machine, [target], baseline, budgets=Budgets(terminate_s=2.0, orphans_s=2.0))
    assert clearance.verdict is Verdict.CLEAN, clearance.to_text()
    assert {one.proof for one in clearance.signals if one.pid == worker} == {"in our cgroup"}
    (said,) = [one for one in clearance.evidence if one.item.startswith("cgroup:")]
    assert said.seen == "populated 0, removed" and not Path(cgroup).exists()


def test_the_twin_without_a_cgroup_is_nobodys(tmp_path: Path) -> None:
    machine = LocalMachine()
    target, worker = escaped(machine, tmp_path, None)
    try:
        clearance = clear(machine, [target], take_baseline(machine), budgets=Budgets(terminate_s=2.0))
        assert worker not in {one.pid for one in clearance.signals} and machine.process(worker) is not None
    finally:
        os.kill(worker, signal.SIGKILL)


def test_the_program_starts_inside_and_keeps_pid_and_start(cgroup: str, tmp_path: Path) -> None:
    machine = LocalMachine()
    inside = f"print(open('/proc/self/cgroup').read().count({Path(cgroup).name!r}), flush=True)"
    owned = launch(
        machine,
        argv=[sys.executable, "-S", "-c", inside],
        env={},
        cwd=tmp_path,
        log=tmp_path / "log",
        cookie="x",
        cgroup=cgroup,
    )
    until_s = time.monotonic() + 30.0
    while owned.exit_code() is None and time.monotonic() < until_s:
        time.sleep(0.01)
    process = machine.process(owned.pid)
    assert process is not None and process.identity == owned.identity
    assert (tmp_path / "log").read_text() == "1\n" and machine.cgroup_populated(cgroup) is False
    machine.reap(owned.identity)


def test_a_program_that_is_not_there_is_said_as_without_a_cgroup(cgroup: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LocalMachine().spawn(["no-such-program"], env={}, cwd=tmp_path, log=tmp_path / "log", cgroup=cgroup)


def test_a_name_that_is_in_use_gets_a_number(cgroup: str, tmp_path: Path) -> None:
    machine = LocalMachine()
    target, _ = escaped(machine, tmp_path, cgroup)
    other = machine.make_cgroup(Path(cgroup).name)
    assert other == f"{cgroup}.1" and machine.remove_cgroup(other)
    assert not machine.remove_cgroup(cgroup) and machine.kill_cgroup(cgroup)
    assert target.cgroup == cgroup


def test_names_tell_nothing_and_nowhere_is_none() -> None:
    assert "secret" not in cgroup_name("secret") and cgroup_name("a") != cgroup_name("b")
    machine = LocalMachine()
    assert machine.cgroup_populated("/nowhere") is None and machine.cgroup_members("/nowhere") == frozenset()
    assert not machine.kill_cgroup("/nowhere") and not machine.remove_cgroup("/nowhere")
