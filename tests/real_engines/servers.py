"""Starting a real engine as a user does, without Changeover, and having it busy."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from changeover.machine import cgroups
from changeover.machine.local import LocalMachine
from changeover.machine.processes import read_boot_id, read_command, read_processes
from changeover.teardown.launch import Owned, launch

START_LIMIT_S = 280.0
SGLANG_ON_A_CPU = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--max-total-tokens", "4096", "--sleep-on-idle"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
]


@dataclass
class Engine:
    """An engine of ``.ci/engines``: its environment, and how it is started for a model on a port."""

    kind: str
    home: Path
    model: Path
    env: dict[str, str] = field(default_factory=dict)

    def argv(self, port: int) -> list[str]:
        python = str(self.home / "bin" / "python")
        address = ["--host", "127.0.0.1", "--port", str(port)]
        if self.kind == "vllm":
            flags = ["--enforce-eager", "--max-model-len", "1024", "--dtype", "float32"]
            return [python, str(self.home / "bin" / "vllm"), "serve", str(self.model), *flags, *address]
        flags = ["--mem-fraction-static", "0.1", *SGLANG_ON_A_CPU]
        return [python, "-m", "sglang.launch_server", "--model-path", str(self.model), *flags, *address]

    def environment(self) -> dict[str, str]:
        """Without what belongs to this test's own Python."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        path = f"{self.home / 'bin'}:{inherited['PATH']}"
        return {**inherited, "HF_HUB_OFFLINE": "1", "PATH": path, **self.env}


def vllm(home: Path, model: Path) -> Engine:
    return Engine("vllm", home / "vllm", model, {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"})


def sglang(home: Path, model: Path) -> Engine:
    return Engine("sglang", home / "sglang", model, {"SGLANG_USE_CPU_ENGINE": "1"})


def launched(engine: Engine, machine: LocalMachine, folder: Path, port: int) -> Owned:
    """Started as a pipeline starts it, in a cgroup where there is one; the caller clears it."""
    return launch(
        machine,
        argv=engine.argv(port),
        env=engine.environment(),
        cwd=folder,
        log=folder / "log",
        cookie="this-tests-secret",
        cgroup=machine.make_cgroup(f"changeover-test-{os.getpid()}"),
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Launched:
    """A process that Changeover launched, with as much of Popen's face as is needed here."""

    owned: Owned

    @property
    def pid(self) -> int:
        return self.owned.pid

    def poll(self) -> int | None:
        return self.owned.exit_code()


@dataclass
class Server:
    """A server that answers."""

    leader: Any  # subprocess.Popen, or Launched
    port: int
    log: Path

    def pids(self, title: str) -> list[int]:
        """Processes in its session whose title or command line begins so, or holds it as a word."""
        return [
            process.pid
            for process in read_processes(read_boot_id()).values()
            if process.sid == self.leader.pid and process.alive
            for command in (read_command(process.pid),)
            if command and (command[0].startswith(title) or title in command)
        ]

    def session(self) -> list[int]:
        everybody = read_processes(read_boot_id()).values()
        return [one.pid for one in everybody if one.sid == self.leader.pid and one.alive]


@contextmanager
def started(engine: Engine, folder: Path, port: int | None = None) -> Iterator[Server]:
    """Up and generating; whatever the test does to it, nothing of it is left afterwards."""
    port = port or free_port()
    log = folder / f"{engine.kind}-{port}-{secrets.token_hex(2)}.log"
    cgroup = cgroups.make_cgroup(f"changeover-test-{secrets.token_hex(4)}")
    argv = engine.argv(port)
    if cgroup is not None:  # for the end of the test only: nothing that Changeover knows of
        argv = ["/bin/sh", "-c", cgroups.ENTER, "sh", cgroup, *argv]
    with log.open("wb") as sink:
        leader = subprocess.Popen(
            argv,
            cwd=folder,
            env=engine.environment(),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(leader, port, log)
    try:
        wait_until_it_generates(server, engine)
        yield server
    finally:
        for pid in server.session():
            os.kill(pid, signal.SIGKILL)
        if cgroup is not None:
            cgroups.kill(cgroup)
        leader.wait()
        until_s = time.monotonic() + 30.0
        while cgroup is not None and cgroups.is_populated(cgroup) and time.monotonic() < until_s:
            time.sleep(0.05)
        if cgroup is not None:
            cgroups.remove(cgroup)


def wait_until_it_generates(
    server: Server, engine: Engine, while_waiting: Callable[[], object] = lambda: None
) -> None:
    until_s = time.monotonic() + START_LIMIT_S
    while True:
        while_waiting()
        try:
            if generate(server.port, str(engine.model), tokens=1, timeout_s=60.0).get("choices"):
                return
        except (OSError, http.client.HTTPException, ValueError) as error:
            seen = repr(error)
        ended = server.leader.poll()
        if ended is not None or time.monotonic() > until_s:
            tail = server.log.read_text(errors="replace")[-3000:]
            raise AssertionError(f"{engine.kind} did not come up (exit {ended}, last saw {seen}):\n{tail}")
        time.sleep(0.5)


def generate(port: int, model: str, *, tokens: int, timeout_s: float) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        body = {"model": model, "prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0}
        body["ignore_eos"] = True
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer
    finally:
        connection.close()


@contextmanager
def clients(port: int, model: str, count: int, tokens: int) -> Iterator[list[str]]:
    """So many requests in flight, each of so many tokens; how they ended is filled in as they do."""
    ends: list[str] = []

    def ask() -> None:
        try:
            answer = generate(port, model, tokens=tokens, timeout_s=280.0)
            ends.append("answered" if answer.get("choices") else f"refused: {answer}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            ends.append(f"lost: {error!r}")

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(count)]
    for one in threads:
        one.start()
    try:
        yield ends
    finally:
        for one in threads:
            one.join(timeout=290.0)


@contextmanager
def half_a_request(port: int) -> Iterator[None]:
    """A client that has sent its headers and one byte of its body, and is in no hurry."""
    with socket.create_connection(("127.0.0.1", port), timeout=10.0) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        yield
