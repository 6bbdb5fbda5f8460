"""The machine's lock."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from changeover.machine.errors import InvalidInput
from changeover.machine.simulated import SimulatedMachine
from changeover.machine.simulated_world import SimulatedClock, SimulatedGpu
from changeover.teardown.claim import (
    MachineClaimed,
    MachineTaken,
    claim,
    default_lock_path,
    expect_as_cleared,
)
from changeover.teardown.footprint import take_baseline

_HOLDS = """
import sys
from dataclasses import replace
from pathlib import Path
from changeover.machine.simulated import SimulatedMachine
from changeover.machine.simulated_world import SimulatedGpu
from changeover.teardown.claim import claim
with claim("run other", path=Path(sys.argv[1])):
    print("held", flush=True)
    input()
"""


def test_one_at_a_time_and_the_holder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "changeover" / "machine.lock"
    command = [sys.executable, "-c", _HOLDS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        clock = SimulatedClock()
        with (
            pytest.raises(MachineClaimed) as refused,
            claim("run mine", path=path, timeout_s=5.0, clock=clock),
        ):
            pass
        assert f"pid {other.pid}: run other" in refused.value.seen and refused.value.exit_code == 5
        assert clock.now_s - 1000.0 == pytest.approx(5.0, abs=0.2)
        other.kill()
    with claim("run mine", path=path):
        assert "run mine" in path.read_text(), "the kernel dropped the lock with its holder"


def test_a_child_does_not_inherit_it(tmp_path: Path) -> None:
    path = tmp_path / "machine.lock"
    with claim("first", path=path):
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], close_fds=False)
    try:
        with claim("second", path=path):
            pass
    finally:
        child.kill()
        child.wait()


def test_the_folder_must_be_our_own(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(InvalidInput, match="through a link"),
        claim("x", path=tmp_path / "link" / "machine.lock"),
    ):
        pass


def test_a_login_and_cron_find_the_same_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHANGEOVER_LOCK_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/0")
    login = default_lock_path()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_lock_path() == login == Path(f"/tmp/changeover-{os.getuid()}/machine.lock")
    monkeypatch.setenv("CHANGEOVER_LOCK_DIR", "/elsewhere")
    assert default_lock_path() == Path("/elsewhere/machine.lock")


def test_llm_d_fma_720_who_came_after_the_clearance_is_found_at_the_claim() -> None:
    """llm-d-fast-model-actuation #720: 0 MiB was verified, and the next server found 16.9 of 79 GiB free."""
    gpu = SimulatedGpu("GPU-0", idle_mib=4.0)
    machine = SimulatedMachine(gpus=[gpu])
    before = take_baseline(machine)
    expect_as_cleared(before, take_baseline(machine), 32.0)
    gpu.idle_mib = 30.0  # a monitor more
    expect_as_cleared(before, take_baseline(machine), 32.0)
    gpu.foreign_mib = lambda _now_s: 62_000.0
    with pytest.raises(MachineTaken, match="62030 MiB, 4 at the start") as taken:
        expect_as_cleared(before, take_baseline(machine), 32.0)
    assert taken.value.exit_code == 5
    expect_as_cleared(replace(before, boot_id="another"), take_baseline(machine), 32.0)
