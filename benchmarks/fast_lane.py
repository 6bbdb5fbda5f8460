"""From proven idle to proven clean with a real engine: its own SIGTERM against the fast lane, in turn.

Starts the engine as a pipeline does, has it answer a few requests, lets it become idle, and clears it.

    python benchmarks/fast_lane.py --engine sglang --port 30000 [--rounds fast,graceful,fast] -- ARGV...  > result.json

``ARGV`` is the whole command of the server; it must listen on the port given.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from changeover.engines.protocol import ServerCommand, generate_one_token
from changeover.engines.registry import get_engine
from changeover.machine.http import HttpError
from changeover.machine.local import LocalMachine
from changeover.teardown.budgets import Budgets
from changeover.teardown.clear import clear
from changeover.teardown.footprint import StopPolicy, take_baseline
from changeover.teardown.launch import launch
from changeover.teardown.leftovers import observe

START_LIMIT_S = 300.0


def one_round(
    machine: LocalMachine, engine: str, port: int, argv: list[str], policy: str, folder: Path
) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}"
    baseline = take_baseline(machine)
    cgroup = machine.make_cgroup(f"changeover-bench-{os.getpid()}-{time.monotonic_ns()}")
    log = folder / "log"
    started_s = time.monotonic()
    owned = launch(machine, argv=argv, env={}, cwd=folder, log=log, cookie="bench", cgroup=cgroup)
    while True:
        if owned.exit_code() is not None or time.monotonic() > started_s + START_LIMIT_S:
            raise SystemExit(f"the server did not come up: {log.read_text(errors='replace')[-3000:]}")
        try:
            generate_one_token(url, timeout_s=60.0)
            break
        except (OSError, HttpError):
            time.sleep(0.5)
    ready_s = time.monotonic() - started_s
    for _ in range(3):
        generate_one_token(url, timeout_s=60.0)
    command = ServerCommand(argv=tuple(argv), env={}, ports=(port,), url=url)
    drain = get_engine(engine).drain(command)
    target = owned.target("server", ports=(port,), drain=drain, stop=StopPolicy(policy))
    target = observe(machine, target)
    rss_mib = sum(
        process.rss_mib
        for member in target.members
        for process in (machine.process(member.pid),)
        if process is not None
    )
    with machine.watching_gpus():  # as in a pipeline, the driver has been entered before the phase ends
        machine.gpus(30.0)
        clearance = clear(machine, [target], baseline, budgets=Budgets())
    drained_s = sum(one.seconds for one in clearance.stages if one.stage in ("plan", "drain"))
    machine.reap(owned.identity)
    return {
        "policy": policy,
        "ready_s": ready_s,
        "members": len(target.members),
        "segments": len(target.segments),
        "sockets": len(target.sockets),
        "derived_ports": len(target.derived_ports),
        "rss_mib": rss_mib,
        "drained_s": drained_s,
        "idle_to_clean_s": clearance.seconds - drained_s,
        "clearance": clearance.to_json(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rounds", default="fast,graceful,fast")
    parser.add_argument("argv", nargs="+", help="after --")
    given = parser.parse_args()
    machine = LocalMachine(adopt_orphans=True)
    rounds = []
    for policy in given.rounds.split(","):
        with tempfile.TemporaryDirectory() as name:
            one = one_round(machine, given.engine, given.port, given.argv, policy, Path(name))
        rounds.append(one)
        said = f"{policy}: ready {one['ready_s']:.1f} s, idle to clean {one['idle_to_clean_s']:.3f} s"
        print(said, one["clearance"]["verdict"], file=sys.stderr, flush=True)
        if one["clearance"]["verdict"] != "clean":
            print(json.dumps(one["clearance"]), file=sys.stderr, flush=True)
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "engine": given.engine,
        "argv": given.argv,
        "cpus": os.cpu_count(),
        "method": __doc__,
        "rounds": rounds,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
