"""How long a changeover takes on a real NVIDIA GPU, and whether its verdicts are right there.

Needs one free GPU, nvidia-ml-py and nothing else: the processes that hold memory call libcuda themselves.

    python benchmarks/teardown_gpu.py [--gib 20] > teardown_gpu.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from changeover.machine.local import LocalMachine
from changeover.machine.processes import read_open_paths
from changeover.teardown.budgets import Budgets
from changeover.teardown.check import check_machine
from changeover.teardown.clear import MachineSample, clear, observe
from changeover.teardown.clearance import Clearance, SignalRecord, StageRecord
from changeover.teardown.footprint import take_baseline
from changeover.teardown.launch import Owned, launch

HOLDS = """
import ctypes, os, signal, sys, time
gib, workers, ignores, ready = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "ignore", sys.argv[4]
for index in range(workers):
    if os.fork() == 0:
        ready = f"{ready}.{index}"
        break
cuda = ctypes.CDLL("libcuda.so.1")
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
def check(code):
    if code: sys.exit(f"CUDA error {code}")
check(cuda.cuInit(0)); check(cuda.cuDeviceGet(ctypes.byref(device), 0))
check(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device))
check(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(gib << 30)))
check(cuda.cuMemsetD8_v2(memory, ctypes.c_ubyte(1), ctypes.c_size_t(gib << 30)))
check(cuda.cuCtxSynchronize())
if ignores: signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(ready, "w").close()
while True: time.sleep(3600)
"""


class Recorder:
    def __init__(self) -> None:
        self.samples: list[tuple[float, int, float]] = []  # seconds, processes, MiB on the first GPU

    def stage(self, record: StageRecord) -> None:
        pass

    def intent(self, record: SignalRecord) -> None:
        pass

    def sample(self, sample: MachineSample) -> None:
        self.samples.append(
            (round(sample.t_s, 3), sample.processes, sample.gpus[0][1] if sample.gpus else 0.0)
        )


def hold(
    machine: LocalMachine, folder: Path, name: str, gib: int, workers: int, end: str, cookie: str
) -> Owned:
    ready = folder / f"{name}.ready"
    argv = [sys.executable, "-c", HOLDS, str(gib), str(workers), end, str(ready)]
    owned = launch(machine, argv=argv, env={}, cwd=folder, log=folder / f"{name}.log", cookie=cookie)
    expected = [ready, *(Path(f"{ready}.{index}") for index in range(workers))]
    until_s = time.monotonic() + 120
    while not all(path.exists() for path in expected):
        if time.monotonic() > until_s or owned.exit_code() is not None:
            raise SystemExit(f"{name} did not get its memory: {(folder / f'{name}.log').read_text()[-500:]}")
        time.sleep(0.05)
    return owned


def measured(machine: LocalMachine, owned: Owned, baseline: Any, budgets: Budgets) -> dict[str, Any]:
    target = observe(machine, owned.target("server"))
    devices = sorted({one.path for one in read_open_paths(owned.pid) if one.path.startswith("/dev/nvidia")})
    recorder = Recorder()
    clearance = clear(machine, [target], baseline, budgets=budgets, observer=recorder)
    return {
        **shown(clearance),
        "held_mib": recorder.samples[0][2],
        "devices_open": devices,
        "samples": recorder.samples,
    }


def shown(clearance: Clearance) -> dict[str, Any]:
    return {name: value for name, value in clearance.to_json().items() if name not in ("signals", "refusals")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=20, help="GiB per process")
    gib = parser.parse_args().gib
    machine = LocalMachine()
    budgets = Budgets(terminate_s=2.0, orphans_s=2.0, kill_s=20.0, gpu_release_s=20.0)
    result: dict[str, Any] = {"gib_per_process": gib}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started_s = time.monotonic()
        reading = machine.gpus(30.0)
        result["one_reading_in_a_child_s"] = time.monotonic() - started_s
        result["idle"] = [vars(gpu) | {"processes": len(gpu.processes)} for gpu in reading.gpus]
        result["note"] = reading.note
        result["check_idle"] = shown(check_machine(machine))
        baseline = take_baseline(machine)
        for case, workers, end in (
            ("sigterm", 0, "default"),
            ("sigterm_2_workers", 2, "default"),
            ("sigkill", 1, "ignore"),
        ):
            owned = hold(machine, folder, case, gib, workers, end, cookie=f"secret-{case}")
            result[case] = measured(machine, owned, baseline, budgets)
        server = hold(machine, folder, "beside", 1, 0, "default", cookie="secret-beside")
        stranger = hold(LocalMachine(), folder, "stranger", 4, 0, "default", cookie="another run's")
        result["check_busy"] = shown(check_machine(machine))
        result["with_a_stranger"] = measured(machine, server, baseline, budgets)
        result["stranger_lives"] = stranger.exit_code() is None
        result["stranger_cleared"] = measured(stranger.machine, stranger, baseline, budgets)  # type: ignore[arg-type]
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
