"""SIGKILL of Changeover at every event of a run, then resume: no orphan, nothing done twice, nothing half done."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from changeover.machine.local import LocalMachine
from changeover.machine.processes import COOKIE_VARIABLE
from changeover.pipeline.clear_run import clear_run
from changeover.pipeline.folder import create_run
from changeover.pipeline.journal import Journal, read_events
from changeover.pipeline.state import RunVerdict, read_state
from changeover.teardown.budgets import Budgets

# each job leaves a line a time that it ran to its end, so that "not repeated" is counted by the job itself
WORK = (
    "open('../../../../did', 'a').write(__import__('os').path.basename(__import__('os').getcwd()) + chr(10))"
)
SLEEP = "__import__('time').sleep(600)"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CHANGEOVER_LOCK_DIR", str(tmp_path))
    (tmp_path / "prompts.txt").write_text("hello\n")
    run = create_run(tmp_path / "runs", "stub")
    yield run
    for pid in alive(run):
        os.kill(pid, signal.SIGKILL)
    if stray_lives(run):
        os.kill(int((run.server(0, "one") / "stray.pid").read_text()), signal.SIGKILL)


def changeover(folder, mode, events=0, work=WORK, **kwargs):
    argv = [sys.executable, "-m", "tests.pipeline.stub.run", str(folder.path), mode, str(events), work]
    return subprocess.Popen(argv, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL, **kwargs)


def alive(folder) -> list[int]:
    """Every process on this machine with a cookie of this run: counted by a way of its own, not by teardown's."""
    started = [("one", "server"), ("one", "a"), ("one", "b"), ("two", "c")]
    cookies = {folder.cookie(phase, name) for phase, name in started}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            mine = {f"{COOKIE_VARIABLE}={cookie}".encode() for cookie in cookies} & set(variables)
            if mine and state != "Z":
                found.append(int(entry.name))
    return found


def stray_lives(folder) -> bool:
    """The worker without the cookie. A pid used again would fail the test, never pass it."""
    path = folder.server(0, "one") / "stray.pid"
    try:
        return Path(f"/proc/{path.read_text()}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def did(folder) -> Counter:
    path = folder.path / "did"
    return Counter(path.read_text().split()) if path.exists() else Counter()


def test_a_run_without_a_crash_does_everything_once(folder):
    assert changeover(folder, "start").wait(120) == 0
    assert did(folder) == {"a": 1, "b": 1, "c": 1}
    state = read_state(read_events(folder.journal))
    assert state.verdict is RunVerdict.DONE
    assert [phase.done for phase in state.phases.values()] == [True, True]
    assert alive(folder) == []
    assert (folder.server(0, "one") / "stray.pid").exists()
    assert not stray_lives(folder)
    assert "<html" in folder.report.read_text()


# more than a run of the stub has: the last ones find it ended, which is checked too
@pytest.mark.slow
@pytest.mark.parametrize("events", range(1, 72))
def test_killed_after_any_event_a_run_can_be_resumed(folder, events):
    first = changeover(folder, "start", events)
    status = first.wait(120)
    if status == 0:
        assert len(read_events(folder.journal)) < events
        return
    assert status == -signal.SIGKILL
    before = read_state(read_events(folder.journal))
    finished = {job for phase in before.phases.values() for job in phase.jobs}
    done_before = did(folder)
    assert changeover(folder, "resume").wait(120) == 0
    after = read_state(read_events(folder.journal))
    assert after.verdict is RunVerdict.DONE
    assert [phase.done for phase in after.phases.values()] == [True, True]
    assert not any(phase.unclear for phase in after.phases.values())
    assert alive(folder) == []
    for job in finished:  # what was written down as done is not done again
        assert did(folder)[job] == done_before[job]
    assert set(did(folder)) == {"a", "b", "c"}


def wait_for(folder, name, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if folder.journal.exists() and any(event.event == name for event in read_events(folder.journal)):
            return
        time.sleep(0.05)
    raise AssertionError(f"no {name} within {timeout_s} s: {read_events(folder.journal)[-1]}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("event", ["server.started", "job.started"])
def test_asked_to_stop_it_clears_the_machine_and_says_so(folder, number, event):
    process = changeover(folder, "start", work=SLEEP)
    wait_for(folder, event)
    process.send_signal(number)
    assert process.wait(60) == 130
    state = read_state(read_events(folder.journal))
    assert state.verdict is RunVerdict.INTERRUPTED
    assert "the machine is cleared" in state.reason
    assert alive(folder) == []


def test_a_job_that_fails_ends_the_run_with_7_and_a_clean_machine(folder):
    assert changeover(folder, "start", work="raise SystemExit(3)").wait(120) == 7
    state = read_state(read_events(folder.journal))
    assert state.verdict is RunVerdict.FAILED
    assert "exit status 0" in state.reason and "saw 3" in state.reason
    assert alive(folder) == []


def test_a_server_that_dies_under_a_job_fails_the_phase_at_once(folder):
    process = changeover(folder, "start", work=SLEEP)
    wait_for(folder, "job.started")
    started = next(event for event in read_events(folder.journal) if event.event == "server.started")
    os.kill(started.data["pid"], signal.SIGKILL)
    killed_s = time.monotonic()
    wait_for(folder, "changeover.started")
    assert time.monotonic() - killed_s < 10
    assert process.wait(120) == 7
    assert "the server to live while job a runs" in read_state(read_events(folder.journal)).reason
    assert alive(folder) == []


def test_an_output_that_was_changed_after_its_phase_is_made_again(folder):
    assert changeover(folder, "start").wait(120) == 0
    (folder.job(0, "one", "a") / "result.json").write_text("{}")
    assert changeover(folder, "resume").wait(120) == 0
    assert did(folder) == {"a": 2, "b": 1, "c": 1}


def test_a_disk_that_gets_full_leaves_nobody_on_the_machine(folder):
    """The job has just been started, its server still runs, and no signal can be written down before it is sent."""
    process = changeover(folder, "full", work=SLEEP, stderr=subprocess.PIPE, text=True)
    _, said = process.communicate(timeout=120)
    assert alive(folder) == []
    assert not stray_lives(folder)
    assert process.returncode == 7
    assert "No space left on device" in said and "changeover.signal" in said
    assert read_events(folder.journal)[-1].event == "job.starting"


def test_a_full_disk_keeps_nobody_from_clearing_what_was_left(folder, monkeypatch, capsys):
    first = changeover(folder, "start", work=SLEEP)
    wait_for(folder, "job.started")
    first.kill()
    first.wait()
    assert alive(folder)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "_write", full)
    clear_run(folder.path, LocalMachine(), Budgets())
    assert alive(folder) == []
    assert "No space left on device" in capsys.readouterr().err


def test_whoever_lives_when_a_server_is_ready_is_known_even_if_changeover_is_killed_then(folder):
    """The stray has no cookie, and the subreaper that had it is gone: only the journal can tell that it is ours."""
    first = changeover(folder, "start", work=SLEEP)
    wait_for(folder, "server.ready")
    first.kill()
    first.wait()
    assert stray_lives(folder)
    assert clear_run(folder.path, LocalMachine(), Budgets()).clean
    assert not stray_lives(folder)
