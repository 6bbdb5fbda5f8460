"""GPUs by UUID, and as NVML tells them (AMD's: ``amd_gpus``).

Memory in use is ``total - free - reserved`` of the v2 call: v1 counts the driver's own reserve (615 MiB on
an idle H200) and drivers differ on whether v2's ``used`` does. All three process lists are read (compute,
graphics, MPS); their pids may be another namespace's and prove nothing.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from changeover.machine.bounded import Answer, BoundedChild, BoundedResult, begin_probe, run_probe

CONTROL_DEVICE = Path("/dev/nvidiactl")


class Presence(StrEnum):
    """What a reading of the GPUs is worth."""

    READ = "read"
    ABSENT = "absent"
    UNREADABLE = "unreadable"


@dataclass(frozen=True)
class GpuProcess:
    """An entry of one of NVML's lists; ``used_mib`` is None where the driver does not say (MIG,
    containers).
    """

    pid: int
    used_mib: float | None
    kind: str  # "compute", "graphics" or "mps"


@dataclass(frozen=True)
class GpuFacts:
    """One GPU at one moment. ``health`` holds what makes it unusable, in words; empty when nothing does.

    An Xid error of the past is not in it: NVML reports them only to whoever listens while they happen.
    ``memory_call`` says whose figure ``used_mib`` is: only those of one call can be compared.
    """

    uuid: str
    index: int
    name: str
    total_mib: float
    used_mib: float
    reserved_mib: float
    memory_call: str  # "v2", "amdsmi", or "v1" on drivers without v2: then used_mib includes the reserve
    persistence: bool | None
    processes: tuple[GpuProcess, ...]
    health: tuple[str, ...] = ()
    mig: bool | None = None
    vendor: str = "nvidia"  # or "amd"


@dataclass(frozen=True)
class GpuReading:
    presence: Presence
    gpus: tuple[GpuFacts, ...] = ()
    note: str = ""

    def by_uuid(self) -> dict[str, GpuFacts]:
        return {gpu.uuid: gpu for gpu in self.gpus}


NO_GPU = GpuReading(Presence.ABSENT, note="no GPU present")


@dataclass(frozen=True)
class ContextReading:
    """Whether a fresh CUDA context could be made on a GPU, memory taken and given back; ``seconds`` in the
    child.
    """

    uuid: str
    ok: bool
    answered: bool
    seconds: float
    note: str


def joined(nvidia: GpuReading, amd: GpuReading) -> GpuReading:
    """One reading of a machine: what one driver does not say must not be hidden by what the other says."""
    both = (nvidia, amd)
    if amd.presence is Presence.ABSENT and nvidia.presence is not Presence.ABSENT:
        return nvidia
    if nvidia.presence is Presence.ABSENT and amd.presence is not Presence.ABSENT:
        return amd
    gpus = tuple(gpu for one in both for gpu in one.gpus)
    note = "; ".join(dict.fromkeys(one.note for one in both if one.note))
    worst = Presence.UNREADABLE if any(one.presence is Presence.UNREADABLE for one in both) else None
    return GpuReading(worst or nvidia.presence, gpus, note)


def no_nvidia_driver(control_device: Path = CONTROL_DEVICE) -> bool:
    """Neither the driver's control device nor NVML's library: decided without starting anything.

    One of them alone is not absence: WSL has the library and no device, a broken container the device alone.
    """
    if control_device.exists():
        return False
    try:
        ctypes.CDLL("libnvidia-ml.so.1")  # loading it does not enter the driver; nvmlInit would
    except OSError:
        return True
    return False


def read_nvidia(timeout_s: float) -> GpuReading:
    """All NVIDIA GPUs, read in a child with a deadline."""
    if no_nvidia_driver():
        return NO_GPU
    result = run_probe("changeover.machine.gpu_probe", timeout_s=timeout_s)
    if result.answer is not Answer.GIVEN:
        return GpuReading(Presence.UNREADABLE, note=f"NVML: {result.note}")
    return read_answer(result.output, "NVML")


def read_answer(text: str | bytes, library: str) -> GpuReading:
    """What a probe printed, as a reading: unreadable where it is not what a probe prints."""
    try:
        return parse_reading(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        return GpuReading(Presence.UNREADABLE, note=f"{library} probe answered nonsense: {error}")


def parse_reading(value: dict[str, Any]) -> GpuReading:
    """The probe's JSON as facts."""
    gpus = tuple(
        GpuFacts(
            **{
                **gpu,
                "processes": tuple(GpuProcess(**process) for process in gpu["processes"]),
                "health": tuple(gpu["health"]),
            }
        )
        for gpu in value["gpus"]
    )
    return GpuReading(Presence(value["presence"]), gpus, value["note"])


def begin_cuda_context(uuid: str) -> BoundedChild:
    """A child that will make a context on the GPU with this UUID once it is told to (any line)."""
    return begin_probe("changeover.machine.context_probe", env={"CUDA_VISIBLE_DEVICES": uuid})


def context_reading(uuid: str, result: BoundedResult, timeout_s: float) -> ContextReading:
    """What the child's end says: no answer is another thing than a refusal."""
    if result.answer is Answer.TIMEOUT:
        return ContextReading(uuid, ok=False, answered=False, seconds=timeout_s, note=result.note)
    if result.answer is Answer.FAILED:
        return ContextReading(uuid, ok=False, answered=True, seconds=0.0, note=result.note)
    seconds = float(json.loads(result.output)["seconds"])
    return ContextReading(uuid, ok=True, answered=True, seconds=seconds, note="")
