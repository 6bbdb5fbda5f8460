"""Where the real engines are, the command under test, and strangers that look like engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.real_engines import servers

SHM, TMP = Path("/dev/shm"), Path("/tmp")


@pytest.fixture(scope="session")
def engines() -> Path:
    """Made by ``.ci/engines``. Without them these tests fail in CI, and are skipped on a developer's machine."""
    given = os.environ.get("CHANGEOVER_ENGINES")
    if given and (Path(given) / "ready").exists():
        return Path(given)
    reason = f"no engines (CHANGEOVER_ENGINES={given}): export CHANGEOVER_ENGINES=$(.ci/engines)"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def vllm(engines: Path, model_dir: Path) -> servers.Engine:
    return servers.vllm(engines, model_dir)


@pytest.fixture(scope="session")
def sglang(engines: Path, model_dir: Path) -> servers.Engine:
    return servers.sglang(engines, model_dir)


@dataclass
class Said:
    """What a command said: exit code, its one JSON object, its text."""

    code: int
    json: dict[str, Any]
    text: str


Changeover = Callable[..., Said]


@pytest.fixture
def changeover(tmp_path: Path) -> Changeover:
    """``changeover ARGUMENTS --json``, as a command of its own."""
    env = {**os.environ, "CHANGEOVER_LOCK_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}

    def run(*arguments: str) -> Said:
        argv = [sys.executable, "-m", "changeover", *arguments, "--json"]
        done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280)
        return Said(done.returncode, json.loads(done.stdout or "{}"), done.stderr)

    return run


@pytest.fixture
def decoys() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Strangers whose command lines hold every pattern that cleaners look for."""
    words = "vllm serve sglang.launch_server sglang::scheduler VLLM::EngineCore launch_server python3"
    running = [
        subprocess.Popen(["sleep", "1000", *()], start_new_session=True),
        subprocess.Popen(["bash", "-c", f"sleep 1000; : {words}"], start_new_session=True),
        subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(1000)", *words.split()],
            start_new_session=True,
        ),
    ]
    yield running
    for one in running:
        for pid in (one.pid, *children(one.pid)):
            subprocess.run(["kill", "-9", str(pid)], check=False, stderr=subprocess.DEVNULL)
        one.wait()


def children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def left_behind(before: frozenset[Path]) -> list[str]:
    """What is in ``/dev/shm`` or a socket in ``/tmp`` now, and was not before."""
    return sorted(str(path) for path in present() - before)


def present() -> frozenset[Path]:
    sockets = {path for path in TMP.iterdir() if path.is_socket()}
    return frozenset(set(SHM.iterdir()) | sockets)
