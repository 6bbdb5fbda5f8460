"""Holds, signals, exits and interrupts on the live system."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from changeover.machine.local import LocalMachine
from changeover.machine.processes import ProcessIdentity
from changeover.machine.protocol import Delivery, Machine
from changeover.machine.simulated import SimulatedMachine

ENVIRONMENT = {"PATH": os.environ["PATH"]}
SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(3600)"]


@pytest.fixture
def machine() -> LocalMachine:
    return LocalMachine()


@pytest.fixture
def sleeper(machine: LocalMachine, tmp_path: Path) -> Iterator[ProcessIdentity]:
    identity = machine.spawn(SLEEPS, env=ENVIRONMENT, cwd=tmp_path, log=tmp_path / "log")
    yield identity
    if identity in machine.spawned():
        handle = machine.open(identity)
        assert handle is not None
        machine.signal(handle, signal.SIGKILL)
        machine.wait([handle], 30.0)
        machine.reap(identity)
        machine.close(handle)


def test_both_machines_speak_the_protocol() -> None:
    machines: list[Machine] = [LocalMachine(), SimulatedMachine()]
    for one in machines:
        own = one.process(one.pid)
        assert own is not None and own.identity.boot_id == one.boot_id
        assert one.pid_max > one.pid > 0 and one.booted_wall_s < one.clock.wall()


def test_spawn_makes_a_session_of_its_own_without_stdin_and_with_only_our_environment(
    machine: LocalMachine, sleeper: ProcessIdentity
) -> None:
    process = machine.process(sleeper.pid)
    assert process is not None and process.identity == sleeper
    assert process.sid == process.pgid == sleeper.pid and process.ppid == os.getpid()
    assert os.readlink(f"/proc/{sleeper.pid}/fd/0") == "/dev/null"
    # what the loader opens for a moment after exec is the program's own; what it inherited would stay
    until_s = time.monotonic() + 30.0
    while (found := set(os.listdir(f"/proc/{sleeper.pid}/fd"))) != {"0", "1", "2"}:
        assert time.monotonic() < until_s, f"descriptors {sorted(found)} stay open"
        time.sleep(0.01)


def test_the_log_is_appended_to(machine: LocalMachine, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    said = [sys.executable, "-S", "-c", "import sys; print('out', flush=True); print('err', file=sys.stderr)"]
    identity = machine.spawn(said, env=ENVIRONMENT, cwd=tmp_path, log=log)
    while machine.exit_code(identity) is None:
        time.sleep(0.01)
    machine.reap(identity)
    assert log.read_text() == "before\nout\nerr\n"


def test_a_wrong_start_time_opens_nothing(machine: LocalMachine, sleeper: ProcessIdentity) -> None:
    assert machine.open(replace(sleeper, start_ticks=sleeper.start_ticks + 1)) is None
    assert machine.open(ProcessIdentity(2**22 + 1, 1, machine.boot_id)) is None


def test_an_exit_is_seen_without_reaping_and_stays_known_after_it(
    machine: LocalMachine, sleeper: ProcessIdentity
) -> None:
    handle = machine.open(sleeper)
    assert handle is not None and machine.exit_code(sleeper) is None
    assert machine.signal(handle, signal.SIGTERM) is Delivery.SENT
    machine.wait([handle], 30.0)
    assert machine.exit_code(sleeper) == -signal.SIGTERM
    zombie = machine.process(sleeper.pid)
    assert zombie is not None and zombie.identity == sleeper, "the pid and the session number are still taken"
    machine.reap(sleeper)
    assert machine.exit_code(sleeper) == -signal.SIGTERM and sleeper not in machine.spawned()
    assert machine.signal(handle, signal.SIGTERM) is Delivery.GONE
    machine.close(handle)


def test_an_exit_code(machine: LocalMachine, tmp_path: Path) -> None:
    argv = [sys.executable, "-S", "-c", "raise SystemExit(7)"]
    identity = machine.spawn(argv, env=ENVIRONMENT, cwd=tmp_path, log=tmp_path / "log")
    while machine.exit_code(identity) is None:
        time.sleep(0.01)
    assert machine.exit_code(identity) == 7
    machine.reap(identity)


def test_waiting_ends_when_the_process_does_and_not_before_the_time(
    machine: LocalMachine, sleeper: ProcessIdentity
) -> None:
    handle = machine.open(sleeper)
    assert handle is not None
    started_s = time.monotonic()
    machine.wait([handle], 0.2)
    assert time.monotonic() - started_s >= 0.19
    machine.signal(handle, signal.SIGKILL)
    started_s = time.monotonic()
    machine.wait([handle], 60.0)
    assert time.monotonic() - started_s < 30.0
    machine.close(handle)


def test_what_somebody_else_started_is_not_reaped(machine: LocalMachine) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    process = machine.process(child.pid)
    assert process is not None
    machine.reap(process.identity)
    assert child.wait() == 0


_DENIED = """
import os, signal, sys
from changeover.machine.local import LocalMachine
os.setuid(65534)
machine = LocalMachine()
parent = machine.process(os.getppid())
handle = machine.open(parent.identity)
print(machine.signal(handle, 0).value)
"""


def test_a_signal_that_the_kernel_denies() -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to become somebody else")
    done = subprocess.run([sys.executable, "-c", _DENIED], capture_output=True, text=True, timeout=60)
    assert done.stdout == "denied\n", done.stderr


def test_interrupts_wait_for_the_end_of_the_block(machine: LocalMachine) -> None:
    seen = []

    def interrupted_twice() -> None:
        with machine.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            seen.append("went on")
        seen.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert seen == ["went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_the_block_an_interrupt_is_immediate() -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
