"""A server is not started where a GPU has less memory free than it will ask for."""

from dataclasses import replace
from pathlib import Path

import pytest

from changeover.engines.protocol import LaunchSpec
from changeover.engines.registry import get_engine
from changeover.machine.gpus import NO_GPU, GpuFacts, GpuProcess, GpuReading, Presence
from changeover.pipeline.gpu_room import GpuTaken, expect_gpu_room, visible

GIB = 2**30
LAUNCH = LaunchSpec("production", Path("/m"), 30000, "python", tensor_parallel=2)


def gpu(index, used_mib, *holders):
    processes = tuple(GpuProcess(pid, mib, "compute") for pid, mib in holders)
    return GpuFacts(f"GPU-{index}abc", index, "H200", 143_771.0, used_mib, 615.0, "v2", True, processes)


def reading(*gpus):
    return GpuReading(Presence.READ, gpus)


def test_vllm_with_a_stranger_on_the_second_gpu_is_not_started():
    held = reading(gpu(0, 0.0), gpu(1, 20_000.0, (4711, 20_000.0)))
    with pytest.raises(GpuTaken) as refused:
        expect_gpu_room(get_engine("vllm"), LAUNCH, 10 * GIB, held, {})
    assert refused.value.exit_code == 5
    assert "129394 MiB free on GPU 1 (H200): vllm asks for 0.9 of the whole" in str(refused.value)
    assert "pid 4711 (20000 MiB)" in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "launch", "weights_gib"),
    [
        ("vllm", replace(LAUNCH, tensor_parallel=1), 10),  # the stranger is on the other one
        ("vllm", replace(LAUNCH, memory_fraction=0.8), 10),
        ("vllm", replace(LAUNCH, flags=("--gpu-memory-utilization=0.5",)), 10),
        ("sglang", LAUNCH, 230),  # a share of what is free
        ("embedded", replace(LAUNCH, device="cpu"), 1000),
    ],
)
def test_what_fits_is_started(kind, launch, weights_gib):
    held = reading(gpu(0, 0.0), gpu(1, 20_000.0, (4711, 20_000.0)))
    expect_gpu_room(get_engine(kind), launch, weights_gib * GIB, held, {})


def test_weights_that_do_not_fit_are_said_for_any_engine():
    held = reading(gpu(0, 0.0), gpu(1, 100_000.0))
    with pytest.raises(GpuTaken, match=r"the weights alone.*held by nobody that is listed"):
        expect_gpu_room(get_engine("sglang"), LAUNCH, 120 * GIB, held, {})
    expect_gpu_room(get_engine("sglang"), LAUNCH, 120 * GIB, held, {"CUDA_VISIBLE_DEVICES": "0"})
    expect_gpu_room(get_engine("sglang"), LAUNCH, 120 * GIB, NO_GPU, {})


def test_the_servers_gpus_are_those_that_cuda_would_give_it():
    gpus = [gpu(index, 0.0) for index in range(4)]

    def seen(text):
        return [one.index for one in visible(gpus, {"CUDA_VISIBLE_DEVICES": text})]

    assert [one.index for one in visible(gpus, {})] == [0, 1, 2, 3]
    assert seen("2, 0") == [2, 0] and seen("GPU-3") == [3] and seen("") == [] and seen("1,-1,2") == [1]
