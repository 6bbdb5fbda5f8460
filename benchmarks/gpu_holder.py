"""A process that holds GPU memory in one of the ways that engines do, for the teardown benchmarks; libcuda only.

    python benchmarks/gpu_holder.py READY [--gib N] [--pinned-gib N] [--workers N] [--export FILE] [--import FILE]
                                          [--ignore-sigterm] [--stop]

``READY`` (and ``READY.<index>`` for each worker) is written once the memory is held.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

IPC_HANDLE_BYTES = 64


class IpcHandle(ctypes.Structure):
    """``CUipcMemHandle``: passed by value."""

    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


def check(code: int, call: str) -> None:
    if code:
        sys.exit(f"{call}: CUDA error {code}")


def make_context() -> ctypes.CDLL:
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    check(cuda.cuInit(0), "cuInit")
    check(cuda.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    check(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device), "cuCtxCreate")
    return cuda


def take_memory(cuda: ctypes.CDLL, gib: int) -> ctypes.c_uint64:
    memory = ctypes.c_uint64()
    check(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(gib << 30)), "cuMemAlloc")
    check(cuda.cuMemsetD8_v2(memory, ctypes.c_ubyte(1), ctypes.c_size_t(gib << 30)), "cuMemsetD8")
    check(cuda.cuCtxSynchronize(), "cuCtxSynchronize")
    return memory


def pin_host_memory(cuda: ctypes.CDLL, gib: int) -> None:
    for _ in range(gib):
        host = ctypes.c_void_p()
        check(cuda.cuMemHostAlloc(ctypes.byref(host), ctypes.c_size_t(1 << 30), 0), "cuMemHostAlloc")


def export_memory(cuda: ctypes.CDLL, memory: ctypes.c_uint64, path: Path) -> None:
    handle = IpcHandle()
    check(cuda.cuIpcGetMemHandle(ctypes.byref(handle), memory), "cuIpcGetMemHandle")
    part = path.with_suffix(".part")
    part.write_bytes(bytes(handle))
    part.rename(path)


def import_memory(cuda: ctypes.CDLL, path: Path) -> None:
    handle = IpcHandle.from_buffer_copy(path.read_bytes())
    memory = ctypes.c_uint64()
    lazily_enable_peer_access = 1
    check(
        cuda.cuIpcOpenMemHandle_v2(ctypes.byref(memory), handle, lazily_enable_peer_access),
        "cuIpcOpenMemHandle",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ready")
    parser.add_argument("--gib", type=int, default=0)
    parser.add_argument("--pinned-gib", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--export", type=Path)
    parser.add_argument("--import", dest="imported", type=Path)
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--stop", action="store_true")
    given = parser.parse_args()
    ready = given.ready
    for index in range(given.workers):
        if os.fork() == 0:
            ready = f"{ready}.{index}"
            break
    holds = ready != given.ready or given.workers == 0  # with workers the leader only leads, as engines' do
    if holds:
        cuda = make_context()
        if given.gib:
            memory = take_memory(cuda, given.gib)
            if given.export:
                export_memory(cuda, memory, given.export)
        if given.pinned_gib:
            pin_host_memory(cuda, given.pinned_gib)
        if given.imported:
            import_memory(cuda, given.imported)
    if given.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(ready).touch()
    if given.stop:
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
