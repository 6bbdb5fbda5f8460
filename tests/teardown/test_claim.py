"""The machine's lock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from changeover.machine.errors import InvalidInput
from changeover.machine.simulated_world import SimulatedClock
from changeover.teardown.claim import MachineClaimed, claim, default_lock_path

_HOLDS = """
import sys
from pathlib import Path
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


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_lock_path() == tmp_path / "changeover" / "machine.lock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert default_lock_path().name == "machine.lock" and str(default_lock_path()).startswith(
        "/tmp/changeover-"
    )
