"""Whether the GPUs have the memory that a server will ask for, before it spends minutes finding out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from changeover.engines.protocol import Engine, LaunchSpec
from changeover.machine.gpus import GpuFacts, GpuReading, Presence
from changeover.pipeline.context import PhaseFailed

_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class GpuTaken(PhaseFailed):
    """Somebody else's memory is in the server's way; nothing was started."""

    exit_code = 5


def expect_gpu_room(
    engine: Engine,
    launch: LaunchSpec,
    weights_bytes: int,
    reading: GpuReading,
    environment: Mapping[str, str],
) -> None:
    """Raise GpuTaken where a GPU of the server has less free than its weights take, or than the engine demands.

    ``environment``: the server's own. Nothing is said where the GPUs cannot be read, or the server does without.
    """
    if launch.device == "cpu" or reading.presence is not Presence.READ:
        return
    for gpu in visible(reading.gpus, environment)[: launch.tensor_parallel]:
        needed, why = needed_mib(engine, launch, weights_bytes, gpu)
        free = gpu.total_mib - gpu.used_mib - (gpu.reserved_mib if gpu.memory_call == "v2" else 0.0)
        if free >= needed:
            continue
        holders = ", ".join(f"pid {one.pid} ({one.used_mib or 0:.0f} MiB)" for one in gpu.processes)
        raise GpuTaken(
            expected=f"{needed:.0f} MiB free on GPU {gpu.index} ({gpu.name}): {why}",
            seen=f"{free:.0f} of {gpu.total_mib:.0f} MiB; held by {holders or 'nobody that is listed'}",
            todo="End what holds it (`changeover check` shows it), choose other GPUs (CUDA_VISIBLE_DEVICES), or give a "
            "smaller `memory_fraction:`.",
        )


def needed_mib(engine: Engine, launch: LaunchSpec, weights_bytes: int, gpu: GpuFacts) -> tuple[float, str]:
    """The most of what is known, and what it is known from."""
    weights = weights_bytes / launch.tensor_parallel / 2**20
    share = engine.claimed_share(launch)
    if share is not None and share * gpu.total_mib > weights:
        return share * gpu.total_mib, f"{engine.kind} asks for {share:g} of the whole"
    return weights, "the weights alone"


def visible(gpus: Sequence[GpuFacts], environment: Mapping[str, str]) -> list[GpuFacts]:
    """Those that a process with this environment has, in its order; all where nothing hides any.

    Indices and UUIDs (or their beginnings) are read as CUDA reads them: the first that is not a device ends the list.
    Indices are taken in PCI order, as NVML counts.
    """
    given = next((environment[name] for name in _HIDING if name in environment), None)
    if given is None:
        return list(gpus)
    chosen: list[GpuFacts] = []
    for word in (word.strip() for word in given.split(",")):
        found = [
            gpu for gpu in gpus if word == str(gpu.index) or (len(word) > 4 and gpu.uuid.startswith(word))
        ]
        if len(found) != 1:
            break
        chosen.append(found[0])
    return chosen
