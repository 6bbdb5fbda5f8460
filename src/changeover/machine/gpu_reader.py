"""A child that stays in NVML for as long as a changeover lasts, and answers each question within a deadline.

Entering NVML takes about 0.2 s, a reading 10 us (H200, driver 580): a child for each reading would make the sampling
coarser than the thing that it samples. It ends when its stdin closes, and so with us, however we end.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time

from changeover.machine.bounded import probe_environment
from changeover.machine.gpus import NO_GPU, GpuReading, Presence, no_nvidia_driver, read_answer

_END_WAIT_S = 1.0


class GpuReader:
    """Reads all GPUs again and again. A child that misses a deadline is killed, and the next question starts anew."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def read(self, timeout_s: float) -> GpuReading:
        if no_nvidia_driver():
            return NO_GPU
        child = self._running()
        line = _ask(child, timeout_s)
        if line is None:
            note = (
                f"no answer in {timeout_s:.1f} s"
                if child.poll() is None
                else f"probe ended ({child.returncode})"
            )
            self.close()
            return GpuReading(Presence.UNREADABLE, note=f"NVML: {note}")
        return read_answer(line, "NVML")

    def begin(self) -> None:
        """Let the child enter NVML now, while others do other things; nothing is waited for."""
        if not no_nvidia_driver():
            self._running()

    def close(self) -> None:
        """End the child; one that hangs in the driver is killed and left to the kernel."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()  # it holds nothing that it would have to put away
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_END_WAIT_S)
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._child = subprocess.Popen(
                [sys.executable, "-m", "changeover.machine.gpu_probe", "--serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=probe_environment(),
            )
        return self._child


def _ask(child: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
    """One line, or None at the deadline or when the child has ended."""
    assert child.stdin is not None and child.stdout is not None  # opened as pipes above
    until_s = time.monotonic() + timeout_s
    try:
        os.write(child.stdin.fileno(), b"\n")
    except BrokenPipeError:
        return None
    answer = b""
    poll = select.poll()
    poll.register(child.stdout.fileno(), select.POLLIN)
    while not answer.endswith(b"\n"):
        left_ms = max(0, round((until_s - time.monotonic()) * 1000))
        if not poll.poll(left_ms):
            return None
        part = os.read(child.stdout.fileno(), 1 << 16)
        if not part:
            return None
        answer += part
    return answer
