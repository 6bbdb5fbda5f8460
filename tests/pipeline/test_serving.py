"""What is looked at before a server is started."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from changeover.engines.protocol import ServerCommand
from changeover.machine.shm import free_mib
from changeover.pipeline.context import PhaseFailed
from changeover.pipeline.serving import expect_shared_memory


def command(**env: str) -> ServerCommand:
    return ServerCommand(argv=("server",), env=env, ports=(1,), url="http://127.0.0.1:1")


def test_nccl_290_too_little_shared_memory_is_said_before_the_load() -> None:
    with pytest.raises(PhaseFailed, match=r"expected 512 MiB free in /dev/shm for 8 ranks.*saw 64 MiB"):
        expect_shared_memory(8, command(), 64.0)


@pytest.mark.parametrize(
    ("ranks", "free", "env"),
    [(1, 0.0, {}), (2, 128.0, {}), (8, 64.0, {"NCCL_SHM_DISABLE": "1"})],
)
def test_what_can_work_is_not_refused(ranks: int, free: float, env: dict[str, str]) -> None:
    expect_shared_memory(ranks, command(**env), free)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_what_others_left_is_not_free(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(tmp_path)], check=True)
    try:
        before = free_mib(tmp_path)
        (tmp_path / "nccl-left").write_bytes(bytes(16 * 2**20))
        assert before == 64.0 and free_mib(tmp_path) == 48.0
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
