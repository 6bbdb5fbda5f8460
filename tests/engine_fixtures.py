"""A running embedded server for any room's tests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 240.0  # torch alone takes half a minute to import on a busy machine
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RunningServer:
    """``url`` without a slash at the end; ``log`` holds stdout and stderr."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str) -> tuple[int, str]:
        return _http(self.url + path, None)

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        status, text = _http(self.url + path, json.dumps(body).encode())
        return status, json.loads(text)

    def stream(self, path: str, body: Any) -> list[dict[str, Any]]:
        """The events of a streamed answer, without ``[DONE]``, which must be there."""
        status, text = _http(self.url + path, json.dumps({**body, "stream": True}).encode())
        assert status == 200, text
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert events[-1] == "[DONE]", text
        return [json.loads(event) for event in events[:-1]]

    def metric(self, name: str) -> float:
        from changeover.teardown.drains import read_gauge

        value = read_gauge(self.get("/metrics")[1], f"changeover:{name}")
        assert value is not None, name
        return value


@contextmanager
def start_embedded(model_dir: Path, *args: str, log: Path, wait: bool = True) -> Iterator[RunningServer]:
    """The server as a process of its own on a free port, ready unless ``wait`` is False; stopped afterwards."""
    port = free_port()
    argv = [sys.executable, "-m", "changeover.engines.embedded", "--model", str(model_dir)]
    argv += ["--port", str(port), "--threads", "2", *args]
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=os.environ,
        )
    server = RunningServer(f"http://127.0.0.1:{port}", process, log)
    try:
        if wait:
            wait_until_healthy(server)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_healthy(server: RunningServer) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise AssertionError(f"the server ended: {server.log.read_text()}")
        try:
            if server.get("/health")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"not ready after {START_TIMEOUT_S} s: {server.log.read_text()}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _http(url: str, body: bytes | None) -> tuple[int, str]:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"} if body else {})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
