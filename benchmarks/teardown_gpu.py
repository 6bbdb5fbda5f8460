"""How long a changeover takes on a real NVIDIA GPU against the kernel's own floor, and whether its verdicts are right.

Each tree is started twice: once it is killed with SIGKILL and NVML is read in this very process every two
milliseconds until the memory is back at its baseline and the last process is gone (the floor), once it is cleared by
``changeover.teardown.clear``. The probe is a fresh context in a child, timed in the same run. Needs one free GPU and
nvidia-ml-py.

    python benchmarks/teardown_gpu.py [--only eight_workers,...] > teardown_gpu.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml

from changeover.machine.local import LocalMachine
from changeover.machine.protocol import Delivery
from changeover.teardown.budgets import Budgets
from changeover.teardown.clear import MachineSample, clear
from changeover.teardown.clearance import Clearance, SignalRecord, StageRecord
from changeover.teardown.footprint import Baseline, take_baseline
from changeover.teardown.launch import Owned, launch
from changeover.teardown.leftovers import observe

HOLDER = Path(__file__).with_name("gpu_holder.py")
MIB = 2**20
TOLERANCE_MIB = 32
FLOOR_LIMIT_S = 30.0
BUDGETS = Budgets(terminate_s=5.0, orphans_s=2.0, kill_s=20.0, gpu_release_s=20.0)


class Recorder:
    """Keeps the samples: seconds, processes, MiB on the first GPU."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int, float]] = []

    def stage(self, record: StageRecord) -> None:
        pass

    def intent(self, record: SignalRecord) -> None:
        pass

    def delivered(self, record: SignalRecord, delivery: Delivery) -> None:
        pass

    def sample(self, sample: MachineSample) -> None:
        self.samples.append(
            (round(sample.t_s, 3), sample.processes, sample.gpus[0][1] if sample.gpus else 0.0)
        )


class Bench:
    """One run of this script: its folder, and the GPU as NVML tells it to this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._count = 0

    def used_mib(self) -> float:
        info = pynvml.nvmlDeviceGetMemoryInfo(self._handle, version=pynvml.nvmlMemory_v2)
        return (info.total - info.free - info.reserved) / MIB

    def hold(self, machine: LocalMachine, *flags: str, env: dict[str, str] | None = None) -> Owned:
        """A tree of holders that has its memory; ``--workers`` is read from the flags."""
        self._count += 1
        ready = self._folder / f"{self._count}.ready"
        log = self._folder / f"{self._count}.log"
        argv = [sys.executable, str(HOLDER), str(ready), *flags]
        owned = launch(
            machine, argv=argv, env=env or {}, cwd=self._folder, log=log, cookie=f"secret-{self._count}"
        )
        workers = int(flags[flags.index("--workers") + 1]) if "--workers" in flags else 0
        awaited = [ready, *(Path(f"{ready}.{index}") for index in range(workers))]
        until_s = time.monotonic() + 120
        while not all(path.exists() for path in awaited):
            if time.monotonic() > until_s or owned.exit_code() is not None:
                raise RuntimeError(f"no memory for {flags}: {log.read_text()[-500:]}")
            time.sleep(0.02)
        return owned

    def floor(self, machine: LocalMachine, flags: tuple[str, ...]) -> dict[str, float]:
        """Seconds from SIGKILL to every member to memory at the baseline, and to the last process gone."""
        before_mib = self.used_mib()
        owned = self.hold(machine, *flags)
        held_mib = self.used_mib() - before_mib
        members = sorted(observe(machine, owned.target("floor")).members)
        handles = [handle for handle in map(machine.open, members) if handle is not None]
        started_s = time.monotonic()
        for handle in handles:
            machine.signal(handle, signal.SIGKILL)
        memory_s = pids_s = None
        while memory_s is None or pids_s is None:
            now_s = time.monotonic() - started_s
            if memory_s is None and self.used_mib() <= before_mib + TOLERANCE_MIB:
                memory_s = now_s
            if pids_s is None and not any(_alive(machine, one.pid) for one in members):
                pids_s = now_s
            if now_s > FLOOR_LIMIT_S:
                raise RuntimeError(f"still {self.used_mib():.0f} MiB after {now_s:.0f} s")
            time.sleep(0.002)
        for handle in handles:
            machine.close(handle)
        machine.reap(owned.identity)
        return {"held_mib": held_mib, "memory_s": memory_s, "pids_s": pids_s}

    def cleared(self, machine: LocalMachine, owned: Owned, baseline: Baseline) -> dict[str, Any]:
        target = observe(machine, owned.target("server"))
        recorder = Recorder()
        with machine.watching_gpus():  # as in a pipeline, the driver has been entered before the phase ends
            machine.gpus(30.0)
            clearance = clear(machine, [target], baseline, budgets=BUDGETS, observer=recorder)
        return {**shown(clearance), "samples": recorder.samples}


def _alive(machine: LocalMachine, pid: int) -> bool:
    process = machine.process(pid)
    return process is not None and process.alive


def shown(clearance: Clearance) -> dict[str, Any]:
    return {name: value for name, value in clearance.to_json().items() if name != "refusals"}


def timed_against_its_floor(bench: Bench, flags: tuple[str, ...], repeats: int = 3) -> dict[str, Any]:
    """The same tree killed and cleared in turn; the probe alone, with nothing on the GPU."""
    machine = LocalMachine()
    baseline = take_baseline(machine)
    uuid = baseline.gpus[0].uuid
    rounds = []
    for _ in range(repeats):
        floor = bench.floor(machine, flags)
        started_s = time.monotonic()
        (context,) = machine.fresh_contexts([uuid], 30.0)
        probe_s = time.monotonic() - started_s
        cleared = bench.cleared(machine, bench.hold(machine, *flags), baseline)
        floor_s = max(floor["memory_s"], floor["pids_s"])
        rounds.append(
            {
                "floor": floor,
                "probe_s": probe_s,
                "context_ok": context.ok,
                "clear": cleared,
                "ratio": (cleared["seconds"] - probe_s) / floor_s,
            }
        )
    return {"flags": flags, "ratios": [round(one["ratio"], 3) for one in rounds], "rounds": rounds}


def ipc_importer(bench: Bench, folder: Path) -> dict[str, Any]:
    """Ours exports 20 GiB, a stranger has it open: ours dies, the memory stays, and the stranger is named."""
    machine, elsewhere = LocalMachine(), LocalMachine()
    baseline = take_baseline(machine)
    handle = folder / "ipc.handle"
    exporter = bench.hold(machine, "--gib", "20", "--export", str(handle))
    importer = bench.hold(elsewhere, "--import", str(handle))
    result = bench.cleared(machine, exporter, baseline)
    after_mib = bench.used_mib()
    lives = importer.exit_code() is None
    own = bench.cleared(elsewhere, importer, baseline)
    return {"exporter": result, "used_mib_after": after_mib, "importer_lives": lives, "importer": own}


def stranger_beside(bench: Bench, _folder: Path) -> dict[str, Any]:
    """A stranger takes 4 GiB while the phase runs: named, left alone, exit 5."""
    machine, elsewhere = LocalMachine(), LocalMachine()
    baseline = take_baseline(machine)
    server = bench.hold(machine, "--gib", "1")
    stranger = bench.hold(elsewhere, "--gib", "4")
    result = bench.cleared(machine, server, baseline)
    lives = stranger.exit_code() is None
    return {
        "server": result,
        "stranger_lives": lives,
        "stranger": bench.cleared(elsewhere, stranger, baseline),
    }


@contextmanager
def mps_daemon(folder: Path) -> Iterator[dict[str, str]]:
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps-log")}
    (folder / "mps").mkdir()
    (folder / "mps-log").mkdir()
    control = ["nvidia-cuda-mps-control"]
    subprocess.run([*control, "-d"], env={**os.environ, **env}, check=True, timeout=30)
    before = dict(os.environ)
    os.environ.update(env)  # whoever asks the daemon finds it as a user's shell would
    try:
        yield env
    finally:
        subprocess.run(control, input="quit\n", text=True, timeout=30, check=False)
        os.environ.clear()
        os.environ.update(before)


def mps_client(bench: Bench, folder: Path) -> dict[str, Any]:
    """A server that is a client of MPS: ended through the control daemon, never by SIGKILL before."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        return {"not_run": "nvidia-cuda-mps-control is not installed here"}
    machine = LocalMachine()
    with mps_daemon(folder) as env:
        first = bench.hold(machine, "--gib", "1", env=env)  # starts the MPS server, which stays
        listed = [one.kind for gpu in machine.gpus(10.0).gpus for one in gpu.processes]
        first_end = bench.cleared(machine, first, take_baseline(machine))
        baseline = take_baseline(machine)
        willing = bench.cleared(machine, bench.hold(machine, "--gib", "4", env=env), baseline)
        stubborn = bench.hold(machine, "--gib", "4", "--ignore-sigterm", env=env)
        ended = bench.cleared(machine, stubborn, baseline)
        again = bench.cleared(machine, bench.hold(machine, "--gib", "1", env=env), baseline)
    return {
        "listed_as": listed,
        "first": first_end,
        "willing": willing,
        "stubborn": ended,
        "a_later_client": again,
    }


CASES: dict[str, Callable[[Bench, Path], dict[str, Any]]] = {
    "one_process_60_gib": lambda bench, _: timed_against_its_floor(bench, ("--gib", "60")),
    "eight_workers_14_gib": lambda bench, _: timed_against_its_floor(
        bench, ("--gib", "14", "--workers", "8")
    ),
    "stopped_holder": lambda bench, _: timed_against_its_floor(bench, ("--gib", "20", "--stop"), repeats=2),
    "ipc_importer": ipc_importer,
    "stranger_beside": stranger_beside,
    "mps_client": mps_client,
    "pinned_24_gib": lambda bench, _: timed_against_its_floor(
        bench, ("--gib", "1", "--pinned-gib", "24"), repeats=2
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(CASES), help="cases, with commas between")
    names = parser.parse_args().only.split(",")
    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": str(pynvml.nvmlDeviceGetName(device)),
        "driver": str(pynvml.nvmlSystemGetDriverVersion()),
        "kernel": os.uname().release,
        "cpus": os.cpu_count(),
        "method": __doc__,
    }
    with tempfile.TemporaryDirectory() as name:
        for case in names:
            folder = Path(name) / case
            folder.mkdir()
            started_s = time.monotonic()
            try:
                result[case] = CASES[case](Bench(folder), folder)
            except Exception as error:  # noqa: BLE001 - one case that fails must not cost the others
                result[case] = {"failed": f"{type(error).__name__}: {error}"}
            spent_s = time.monotonic() - started_s
            brief = {key: value for key, value in result[case].items() if key in ("ratios", "failed")}
            print(f"{case}: {spent_s:.1f} s {brief}", file=sys.stderr, flush=True)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
