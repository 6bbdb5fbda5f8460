"""Fresh CUDA contexts on a made-up driver (``fake_drivers``): prepared, asked, refused, given up."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from changeover.machine.contexts import FreshContexts
from changeover.machine.local import LocalMachine

DRIVERS = Path(__file__).parent / "fake_drivers"


@pytest.fixture
def entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each child that has entered the driver: the GPU that it was shown."""
    path = tmp_path / "entered"
    path.touch()
    monkeypatch.setenv("PYTHONPATH", str(DRIVERS))
    monkeypatch.setenv("FAKE_CUDA_ENTERED", str(path))
    return path


@pytest.fixture
def contexts() -> Iterator[FreshContexts]:
    one = FreshContexts()
    yield one
    one.close()


def test_one_context_on_each_gpu_in_the_order_given(entered: Path, contexts: FreshContexts) -> None:
    readings = contexts.make(["GPU-b", "GPU-a"], 60.0)
    assert [(one.uuid, one.ok, one.note) for one in readings] == [("GPU-b", True, ""), ("GPU-a", True, "")]
    assert sorted(entered.read_text().split()) == ["GPU-a", "GPU-b"]


def test_a_prepared_child_enters_the_driver_only_when_it_is_asked(
    entered: Path, contexts: FreshContexts
) -> None:
    contexts.prepare(["GPU-a"])
    contexts.prepare(["GPU-a", "GPU-b"])  # who is waiting already is not started again
    waiting = [child._child.pid for child in contexts._waiting.values() if child._child]
    assert len(waiting) == 2 and entered.read_text() == ""
    (reading,) = contexts.make(["GPU-a"], 60.0)
    assert reading.ok and entered.read_text() == "GPU-a\n"
    contexts.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in waiting) and entered.read_text() == "GPU-a\n"


def test_a_child_whose_asker_has_died_ends_without_a_context(entered: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "changeover.machine.context_probe"], stdin=subprocess.PIPE, text=True
    )
    _, _ = child.communicate("", timeout=60.0)
    assert child.returncode == 1 and entered.read_text() == ""


def test_a_refusal_is_an_answer(
    entered: Path, contexts: FreshContexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DRIVER", "full")
    (reading,) = contexts.make(["GPU-a"], 60.0)
    assert reading.answered and not reading.ok and "cuMemAlloc: out of memory (2)" in reading.note


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="a machine with a driver")
def test_without_libcuda_it_is_a_failure_that_was_answered(contexts: FreshContexts) -> None:
    contexts.prepare(["GPU-abc"])
    time.sleep(0.01)  # whether it has ended by then makes no difference
    (reading,) = contexts.make(["GPU-abc"], 60.0)
    assert not reading.ok and reading.answered and "libcuda" in reading.note


def test_a_machine_ends_what_it_has_prepared_with_the_block(entered: Path) -> None:
    machine = LocalMachine()
    machine.prepare_contexts(["GPU-a"])
    assert not machine._contexts._waiting  # outside a block there would be nobody to end it
    with machine.watching_gpus():
        machine.prepare_contexts(["GPU-a"])
        assert machine._contexts._waiting
    assert not machine._contexts._waiting and entered.read_text() == ""
