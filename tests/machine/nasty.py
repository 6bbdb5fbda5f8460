"""Processes that are hard to stop or easy to mistake, as real programs on the real ``/proc``.

Each is a small Python script. It says what it has made by writing one JSON line to the file named by
``NASTY_REPORT`` once everything stands, so that no test has to guess how long that takes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from changeover.machine.errors import ChangeoverError
from changeover.machine.protocol import Machine
from changeover.teardown.launch import Owned, launch

READY_TIMEOUT_S = 60.0

_HEAD = """
import ctypes, json, os, signal, socket, subprocess, sys, threading, time
def report(**facts):
    path = os.environ["NASTY_REPORT"]
    with open(path + ".part", "w") as file:
        json.dump(facts, file)
    os.rename(path + ".part", path)
def forever():
    while True:
        time.sleep(3600)
def listen(port):
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen()
    return listening
def set_name(name):
    ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)
"""

SCRIPTS = {
    "willing": "report(); forever()",
    "listener": "kept = listen(int(os.environ['PORT'])); report(); forever()",
    "ignores_sigterm": "signal.signal(signal.SIGTERM, signal.SIG_IGN); report(); forever()",
    "stopped": "report(); os.kill(os.getpid(), signal.SIGSTOP); forever()",
    "renamed": "set_name('a b) R 1 (x'); report(); forever()",
    "with_worker": """
pid = os.fork()
if pid == 0:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    forever()
report(worker=pid)
forever()
""",
    "double_fork": """
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(writing, str(os.getpid()).encode())
        forever()
    os._exit(0)
os.wait()
report(worker=int(os.read(reading, 20)))
forever()
""",
    # The same, and it drops its environment on the way: no cookie, no session, no parent.
    "double_fork_bare": """
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(writing, str(os.getpid()).encode())
        code = "import time\\nwhile True: time.sleep(3600)"
        os.execve(sys.executable, [sys.executable, "-c", code], {})
    os._exit(0)
os.wait()
worker = int(os.read(reading, 20))
while os.readlink(f"/proc/{worker}/exe") and b"NASTY" in open(f"/proc/{worker}/environ", "rb").read():
    time.sleep(0.01)
report(worker=worker)
forever()
""",
    # Python's main thread leaves by the raw system call while another thread keeps the port.
    "zombie_leader": """
kept = listen(int(os.environ['PORT']))
def rest():
    while open("/proc/self/stat").read().rsplit(")", 1)[1].split()[0] != "Z":
        time.sleep(0.01)
    report()
    forever()
threading.Thread(target=rest).start()
ctypes.CDLL(None).syscall(60, 0)
""",
    "does_not_reap": """
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
report(zombie=pid)
forever()
""",
    "respawner": """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def start():
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"])
child = start()
report(worker=child.pid)
while True:
    child.wait()
    child = start()
""",
    "inherits_the_port": """
kept = listen(int(os.environ['PORT']))
pid = os.fork()
if pid == 0:
    os.setsid()
    forever()
report(worker=pid)
forever()
""",
    # A psm_ segment whose tracker unlinks it as soon as everybody who could use it is dead.
    "segment_with_tracker": """
from multiprocessing import resource_tracker, shared_memory
segment = shared_memory.SharedMemory(create=True, size=1 << 20)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
report(name=segment.name, tracker=resource_tracker._resource_tracker._pid)
forever()
""",
    # The same without a tracker: whoever kills it has a leftover.
    "segment_without_tracker": """
import mmap
path = "/dev/shm/nccl-test-" + str(os.getpid())
file = open(path, "w+b")
file.truncate(1 << 20)
mapped = mmap.mmap(file.fileno(), 1 << 20)
file.close()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
report(path=path)
forever()
""",
    "dies_at_once": "report(); os.abort()",
    "hangs_in_its_destructor": """
class Stuck:
    def __del__(self):
        forever()
stuck = Stuck()
def end(*_):
    global stuck
    stuck = None
signal.signal(signal.SIGTERM, end)
report()
forever()
""",
    "writer": """
kept = open(os.environ["WRITES"], "ab")
pid = os.fork()
if pid == 0:
    os.setsid()
    forever()
report(worker=pid)
forever()
""",
}


class NotReady(ChangeoverError):  # noqa: N818
    """A nasty process that did not get ready; its log is in the message."""


@dataclass
class Nasty:
    """A running nasty process and what it said of itself."""

    owned: Owned
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.owned.pid

    @property
    def worker(self) -> int:
        return int(self.facts["worker"])


def argv(name: str) -> list[str]:
    return [sys.executable, "-c", _HEAD + SCRIPTS[name]]


def start(
    machine: Machine, folder: Path, name: str, *, cookie: str, env: dict[str, str] | None = None
) -> Nasty:
    """Start it through Changeover's own launch, and wait until everything that it makes stands."""
    report, log = folder / f"{name}.json", folder / f"{name}.log"
    report.unlink(missing_ok=True)
    owned = launch(
        machine,
        argv=argv(name),
        env={"NASTY_REPORT": str(report), **(env or {})},
        cwd=folder,
        log=log,
        cookie=cookie,
    )
    return Nasty(owned, wait_for_report(report, log))


def wait_for_report(report: Path, log: Path) -> dict[str, Any]:
    until_s = time.monotonic() + READY_TIMEOUT_S
    while not report.exists():
        if time.monotonic() > until_s:
            raise NotReady(
                expected=f"{report} within {READY_TIMEOUT_S:.0f} s",
                seen=log.read_text()[-500:],
                todo="Read it.",
            )
        time.sleep(0.01)
    facts: dict[str, Any] = json.loads(report.read_text())
    return facts


def alive(pid: int) -> bool:
    """Of a pid that the test itself knows to be its own."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] not in "ZX"


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment_without_cookie() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "CHANGEOVER_COOKIE"}
