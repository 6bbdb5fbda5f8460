"""GPUs as AMD's driver tells them, through ``amdsmi``. Written from its sources and from reports; never run on a card.

Each reading is a child of its own, unlike NVIDIA's: a process that stays in the library goes on listing the dead once
the last of them has ended (ROCm/rocm-systems #7331), which would look as if ours were still there.
"""

from __future__ import annotations

from pathlib import Path

from changeover.machine.amd_probe import UUID_PREFIX
from changeover.machine.bounded import Answer, run_probe
from changeover.machine.gpus import (
    NO_GPU,
    ContextReading,
    GpuReading,
    Presence,
    context_reading,
    read_answer,
)

KFD = Path("/dev/kfd")
_HIDING = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


def no_amd_driver(kfd: Path = KFD) -> bool:
    """Without the compute driver's device nothing can run on an AMD GPU."""
    return not kfd.exists()


def read_amd(timeout_s: float) -> GpuReading:
    """All AMD GPUs, read in a child with a deadline."""
    if no_amd_driver():
        return NO_GPU
    result = run_probe("changeover.machine.amd_probe", timeout_s=timeout_s)
    if result.answer is not Answer.GIVEN:
        return GpuReading(Presence.UNREADABLE, note=f"amdsmi: {result.note}")
    *_, ours = ("", *result.output.splitlines())  # what the library prints of itself comes before
    return read_answer(ours, "amdsmi")


def read_hip_context(uuid: str, timeout_s: float) -> ContextReading:
    """Memory taken and given back through HIP on the GPU with this UUID, in a child that ends."""
    address = uuid.removeprefix(UUID_PREFIX)
    result = run_probe("changeover.machine.hip_probe", address, timeout_s=timeout_s, without=_HIDING)
    return context_reading(uuid, result, timeout_s)
