"""Stacks are for a person who looks for the reason: what cannot be had is said, never raised."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from changeover.engines import stacks
from changeover.engines.stacks import dump_stacks
from changeover.machine.local import LocalMachine
from changeover.machine.processes import ProcessFacts


@pytest.fixture
def sleeper() -> Iterator[ProcessFacts]:
    child = subprocess.Popen(["sleep", "60"])
    facts = LocalMachine().process(child.pid)
    assert facts is not None
    yield facts
    child.kill()
    child.wait()


def test_a_process_without_python_has_no_stack_and_is_named(sleeper: ProcessFacts) -> None:
    said = dump_stacks([sleeper])
    assert said.startswith(f"--- pid {sleeper.pid} 'sleep', state {sleeper.state}\nno stack: ")


def test_a_py_spy_that_hangs_is_cut_off(
    sleeper: ProcessFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "py-spy"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(stacks, "_program", lambda: str(slow))
    assert "no stack: " in dump_stacks([sleeper], timeout_s=0.2)


def test_without_py_spy_it_is_said(sleeper: ProcessFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_program", lambda: None)
    assert "pip install py-spy" in dump_stacks([sleeper])
