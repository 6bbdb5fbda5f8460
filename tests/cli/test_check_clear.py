"""``changeover check`` and ``changeover clear`` as a user types them, on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from changeover.cli.check import check
from changeover.cli.clear import clear
from changeover.machine.clock import SystemClock
from changeover.machine.errors import InvalidInput
from changeover.machine.local import LocalMachine
from changeover.pipeline.folder import RunBusy, RunFolder
from changeover.pipeline.journal import EventName, Journal, read_events
from changeover.teardown.footprint import take_baseline
from tests.machine import nasty

app = typer.Typer()
app.command("check")(check)
app.command("clear")(clear)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


_DIES = """
import json, os, signal, sys
from pathlib import Path
from changeover.machine.local import LocalMachine
from tests.machine import nasty
one = nasty.start(LocalMachine(), Path(sys.argv[1]), "double_fork", cookie=sys.argv[2], env={"PORT": sys.argv[3]})
print(json.dumps({"leader": one.owned.identity.to_json(), "pids": [one.pid, one.worker]}), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RunFolder, list[int]]]:
    """A run whose Changeover was killed by SIGKILL in the middle of its phase, with its server still there."""
    monkeypatch.setenv("CHANGEOVER_LOCK_DIR", str(tmp_path))
    folder = RunFolder(tmp_path / "runs" / "r1")
    folder.path.mkdir(parents=True)
    folder.secret()
    port = nasty.free_port()
    machine = LocalMachine()
    journal = Journal(folder.journal, SystemClock())
    journal.append(EventName.RUN_STARTED, run_id="r1", spec={}, boot_id=machine.boot_id, pid=1)
    journal.append(EventName.PHASE_STARTED, phase="baseline", index=0, digest="d")
    journal.append(EventName.BASELINE_TAKEN, phase="baseline", baseline=take_baseline(machine).to_json())
    journal.append(
        EventName.SERVER_STARTING,
        phase="baseline",
        engine="embedded",
        profile="p",
        ports=[port],
        url="http://x",
    )
    died = subprocess.run(
        [sys.executable, "-c", _DIES, str(tmp_path), folder.cookie("baseline", "server"), str(port)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    said = json.loads(died.stdout)
    journal.append(EventName.SERVER_STARTED, phase="baseline", leader=said["leader"])
    journal.close()
    yield folder, said["pids"]
    for pid in said["pids"]:
        if nasty.alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_clear_names_everybody_with_the_proof_and_stops_nobody_in_a_dry_run(
    left_behind: tuple[RunFolder, list[int]],
) -> None:
    folder, pids = left_behind
    before = folder.journal.read_bytes()
    outcome = run("clear", "--run", "r1", "--runs-dir", folder.path.parent, "--dry-run", "--json")
    assert outcome.exit_code == 0
    said = json.loads(outcome.stdout)
    assert {one["pid"]: one["proof"] for one in said["processes"]} == {
        pids[0]: "recorded earlier as ours, with the same start time",
        pids[1]: "carries this run's secret in its environment",
    }
    assert f"pid {pids[1]}" in outcome.stderr and "secret in its environment" in outcome.stderr
    assert all(nasty.alive(pid) for pid in pids) and folder.journal.read_bytes() == before
    assert folder.secret() not in outcome.output and folder.cookie("baseline", "server") not in outcome.output


def test_check_sees_the_run_and_clear_ends_it_and_writes_it_down(
    left_behind: tuple[RunFolder, list[int]],
) -> None:
    folder, pids = left_behind
    seen = run("check", "--json")
    assert seen.exit_code in (4, 5)  # 4 where somebody else's leftover is on this box too
    (runs,) = [one for one in json.loads(seen.stdout)["evidence"] if one["item"] == "runs"]
    assert runs["verdict"] == "foreign_holder" and f"pid {pids[0]} " in runs["seen"]
    assert folder.cookie("baseline", "server") not in seen.output
    outcome = run("clear", "--run", "r1", "--runs-dir", folder.path.parent, "--json", "--total-timeout", 60)
    clearance = json.loads(outcome.stdout)
    assert outcome.exit_code == clearance["exit_code"]
    assert not any(nasty.alive(pid) for pid in pids)
    events = read_events(folder.journal)
    signals = [event for event in events if event.event == EventName.CHANGEOVER_SIGNAL]
    assert {event.data["pid"] for event in signals} == set(pids)
    assert events[-1].event == EventName.CHANGEOVER_CLEARED and events[-1].data["clearance"] == clearance
    assert folder.secret() not in folder.journal.read_text()


def test_a_run_that_is_still_worked_on_is_left_to_its_runner(
    left_behind: tuple[RunFolder, list[int]],
) -> None:
    folder, pids = left_behind
    with folder.locked(), pytest.raises(RunBusy):
        run("clear", "--run", "r1", "--runs-dir", folder.path.parent)
    assert all(nasty.alive(pid) for pid in pids)


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="nowhere"):
        run("clear", "--run", "nowhere", "--runs-dir", tmp_path)
    assert not (tmp_path / "nowhere").exists(), "asking makes no folder"


def test_without_a_run(tmp_path: Path) -> None:
    for nothing_or_both in ((), ("--run", "x", "--pid", "5")):
        with pytest.raises(InvalidInput, match="--run ID, or one or more of --pid"):
            run("clear", *nothing_or_both)


def test_check_prints_one_object_and_says_the_same_in_words() -> None:
    outcome = run("check", "--json")
    said = json.loads(outcome.stdout)
    assert outcome.exit_code == said["exit_code"] and said["signals"] == said["stages"] == []
    assert outcome.stderr.startswith(f"{said['verdict']} (exit {said['exit_code']})")
    assert {"runs", "shared-memory"} <= {one["item"] for one in said["evidence"]}
