"""What ``changeover clear`` costs as a whole command, beyond the time that the workers themselves take to end.

A tree of a leader and eight workers that end on SIGTERM after 0.3 s of their own clean-up is ended twice in each
round: once by SIGTERM alone (its own time), once by ``changeover clear --pid LEADER --yes`` from the start of the
command to its end. In the same round the same is done with 1,000 processes of strangers on the machine.

    python benchmarks/teardown_cpu.py [--rounds 7] > teardown_cpu.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TREE = """
import os, signal, sys, time
workers = []
for index in range(8):
    pid = os.fork()
    if pid == 0:
        def end(*_):
            time.sleep(0.3)
            os._exit(0)
        signal.signal(signal.SIGTERM, end)
        open(f"{sys.argv[1]}.{index}", "w").close()
        while True:
            time.sleep(3600)
    workers.append(pid)
def lead(*_):
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    for pid in workers:
        os.waitpid(pid, 0)
    os._exit(0)
signal.signal(signal.SIGTERM, lead)
with open(sys.argv[1] + ".part", "w") as file:
    file.write(" ".join(map(str, workers)))
os.rename(sys.argv[1] + ".part", sys.argv[1])
while True:
    time.sleep(3600)
"""


class Tree:
    """A running tree, reaped by init's stand-in (a thread is not needed: the leader is our child)."""

    def __init__(self, folder: Path, number: int) -> None:
        ready = folder / str(number)
        self.leader = subprocess.Popen(
            [sys.executable, "-S", "-c", TREE, str(ready)], stdin=subprocess.DEVNULL, start_new_session=True
        )
        while not ready.exists() or not all(Path(f"{ready}.{index}").exists() for index in range(8)):
            time.sleep(0.005)
        pids = [self.leader.pid, *(int(pid) for pid in ready.read_text().split())]
        self._holds = [os.pidfd_open(pid) for pid in pids]

    def wait_until_gone(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        for hold in self._holds:
            if not select.select([hold], [], [], max(0.0, until_s - time.monotonic()))[0]:
                raise RuntimeError("a process of the tree lives on")
            os.close(hold)
        self.leader.wait()


def own_time_s(folder: Path, number: int) -> float:
    tree = Tree(folder, number)
    started_s = time.monotonic()
    tree.leader.send_signal(signal.SIGTERM)
    tree.wait_until_gone(30.0)
    return time.monotonic() - started_s


def command_time_s(folder: Path, number: int) -> tuple[float, dict[str, Any]]:
    tree = Tree(folder, number)
    argv = [sys.executable, "-m", "changeover", "clear", "--pid", str(tree.leader.pid), "--yes", "--json"]
    started_s = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True)
    seconds = time.monotonic() - started_s
    if done.returncode != 0:
        raise RuntimeError(f"exit {done.returncode}: {done.stderr}")
    tree.wait_until_gone(0.0)  # the command said clean: nobody may live now
    return seconds, json.loads(done.stdout)


@contextmanager
def strangers(count: int) -> Iterator[None]:
    sleeping = [
        subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, start_new_session=True)
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for one in sleeping:
            one.kill()
        for one in sleeping:
            one.wait()


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


@dataclass
class Measured:
    """Seconds of one round each: the tree's own, the whole command's, and what the command says of itself."""

    own: list[float] = field(default_factory=list)
    command: list[float] = field(default_factory=list)
    clearing: list[float] = field(default_factory=list)

    def round(self, folder: Path) -> None:
        number = 2 * len(self.own)
        self.own.append(own_time_s(folder, number))
        seconds, said = command_time_s(folder, number + 1)
        self.command.append(seconds)
        self.clearing.append(said["seconds"])

    def beyond(self) -> list[float]:
        return [with_us - alone for with_us, alone in zip(self.command, self.own, strict=True)]

    def to_json(self) -> dict[str, Any]:
        return {
            "rounds": len(self.own),
            "own_s": spread(self.own),
            "command_s": spread(self.command),
            "beyond_own_s": spread(self.beyond()),
            "of_which_clearing_s": spread(self.clearing),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    alone, crowded = Measured(), Measured()
    processes_before = sum(entry.name.isdigit() for entry in Path("/proc").iterdir())
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / part for part in ("warm", "alone", "crowded")]
        for folder in folders:
            folder.mkdir()
        Measured().round(folders[0])  # compiled files and caches
        for _ in range(rounds):
            alone.round(folders[1])
            with strangers(1000):
                crowded.round(folders[2])
    added = [late - early for early, late in zip(alone.beyond(), crowded.beyond(), strict=True)]
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpus": os.cpu_count(),
        "kernel": os.uname().release,
        "processes_before": processes_before,
        "method": __doc__,
        "alone": alone.to_json(),
        "with_1000_strangers": crowded.to_json(),
        "added_by_1000_strangers_s": spread(added),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
