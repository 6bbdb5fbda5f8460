"""What reading ahead saves: a real engine's start from an empty page cache, without it and after it, in turn.

The page cache is emptied before each start (as root: ``/proc/sys/vm/drop_caches``), as hours of writing states would.
"After" means that the process which runs beside a training had its time; its own seconds are given too. What it saves
is what the disk takes: ``--read-mib-per-s`` slows it to that of a network volume (cgroup v1, ``blkio.throttle``).

    python benchmarks/overlap.py --engine vllm --python VENV/bin/python --model FOLDER -- FLAGS... > result.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from changeover.engines.models import weight_files
from changeover.engines.protocol import LaunchSpec, ServerCommand
from changeover.engines.readiness import wait_ready
from changeover.engines.registry import get_engine
from changeover.engines.versions import installed_version
from changeover.machine.durable import replace_json
from changeover.machine.local import LocalMachine
from changeover.machine.page_cache import look
from changeover.pipeline.commands import free_port
from changeover.teardown.budgets import Budgets
from changeover.teardown.clear import clear
from changeover.teardown.footprint import take_baseline
from changeover.teardown.launch import launch
from changeover.teardown.leftovers import observe


def empty_the_page_cache() -> None:
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")


def slow_down(mib_per_s: int) -> None:
    """For this process and what it starts: reads from the disk of this folder at no more than this."""
    device = Path().stat().st_dev
    group = Path("/sys/fs/cgroup/blkio/changeover-bench")
    group.mkdir(exist_ok=True)
    limit = f"{os.major(device)}:{os.minor(device)} {mib_per_s * 2**20}"
    (group / "blkio.throttle.read_bps_device").write_text(limit)
    (group / "cgroup.procs").write_text(str(os.getpid()))


def read_ahead(
    model: Path, python: str, module: str | None, env: dict[str, str], folder: Path
) -> dict[str, Any]:
    """What stands beside a training, until it has done everything once."""
    replace_json(
        folder / "request.json",
        {"files": list(map(str, weight_files(model))), "python": python, "module": module, "env": env},
    )
    began_s = time.monotonic()
    reader = subprocess.Popen([sys.executable, "-m", "changeover.pipeline.ahead_reader", str(folder)])
    try:
        while True:
            time.sleep(0.1)
            try:
                done: dict[str, Any] = json.loads((folder / "ahead.json").read_text())
            except FileNotFoundError:
                continue
            if module is None or done["imported"] is not None:
                return {**done, "seconds": time.monotonic() - began_s}
    finally:
        reader.terminate()
        reader.wait()


def start(
    machine: LocalMachine, kind: str, model: Path, python: str, flags: list[str], folder: Path
) -> dict[str, Any]:
    engine = get_engine(kind)
    baseline = take_baseline(machine)
    spec = LaunchSpec("production", model, free_port(), python, flags=tuple(flags))
    command: ServerCommand = engine.server_command(spec)
    env = {"PATH": f"{Path(python).parent}:{os.environ['PATH']}", **command.env, **EXTRA.get(kind, {})}
    cgroup = machine.make_cgroup(f"changeover-bench-{os.getpid()}-{time.monotonic_ns()}")
    cached = look(weight_files(model))
    owned = launch(
        machine,
        argv=list(command.argv),
        env=env,
        cwd=folder,
        log=folder / "log",
        cookie=f"bench-{os.getpid()}",
        cgroup=cgroup,
    )
    ready = wait_ready(machine, owned, engine, command, checkpoint_bytes=cached.bytes, stall_s=300)
    target = observe(machine, owned.target("server", ports=command.ports, drain=engine.drain(command)))
    clearance = clear(machine, [target], baseline, budgets=Budgets())
    if not ready.ready:
        raise SystemExit(f"{ready.reason}\n{ready.log_tail}")
    return {
        "ready_s": round(ready.seconds, 3),
        "weights_cached_share": None if cached.cached_bytes is None else cached.cached_bytes / cached.bytes,
        "clearance": clearance.verdict.value,
    }


EXTRA = {
    "vllm": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1"},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True, choices=["vllm", "sglang"])
    parser.add_argument("--python", required=True)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--read-mib-per-s", type=int)
    parser.add_argument("flags", nargs="*")
    asked = parser.parse_args()
    if asked.read_mib_per_s is not None:
        slow_down(asked.read_mib_per_s)
    machine = LocalMachine(adopt_orphans=True)
    module = get_engine(asked.engine).server_module
    rounds: list[dict[str, Any]] = []
    for number in range(asked.rounds):
        for ahead in (False, True) if number % 2 == 0 else (True, False):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                empty_the_page_cache()
                env = EXTRA.get(asked.engine, {})
                before = read_ahead(asked.model, asked.python, module, env, folder) if ahead else None
                result = start(machine, asked.engine, asked.model, asked.python, asked.flags, folder)
                rounds.append({"ahead": before, **result})
                print(rounds[-1], file=sys.stderr)
    with_s = [one["ready_s"] for one in rounds if one["ahead"]]
    without_s = [one["ready_s"] for one in rounds if not one["ahead"]]
    result = {
        "what": "seconds from start to a generated token, page cache emptied before each",
        "engine": f"{asked.engine} {installed_version(asked.engine, asked.python)}",
        "weights_bytes": look(weight_files(asked.model)).bytes,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}, Linux {platform.release()}, a local virtual disk",
        "reads_limited_to_mib_per_s": asked.read_mib_per_s,
        "without_s": {"median": statistics.median(without_s), "min": min(without_s), "max": max(without_s)},
        "after_reading_ahead_s": {
            "median": statistics.median(with_s),
            "min": min(with_s),
            "max": max(with_s),
        },
        "saved_s": round(statistics.median(without_s) - statistics.median(with_s), 2),
        "ratio": round(statistics.median(with_s) / statistics.median(without_s), 3),
        "rounds": rounds,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
