"""The child that enters CUDA: makes a context on the one visible GPU, takes memory, gives it back, ends.

It loads the library and then waits for a line on its stdin, so that it can be started before it is needed; until then
it has no GPU's device open. Without that line it ends.

Calls the driver library itself (ctypes on libcuda), so that it needs neither torch nor a CUDA toolkit. What
the process list cannot show, this does: a GPU that reads "0 MiB" and still refuses work (fabric manager
down, reset required, exclusive mode held by somebody).
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

_BYTES = 64 * 2**20


class _CudaError(Exception):
    pass


def _check(library: ctypes.CDLL, code: int, call: str) -> None:
    if code == 0:
        return
    text = ctypes.c_char_p()
    library.cuGetErrorString(code, ctypes.byref(text))
    raise _CudaError(f"{call}: {(text.value or b'unknown error').decode()} ({code})")


def main() -> int:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        if not sys.stdin.readline():
            return 1
        started = time.monotonic()
        device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        _check(cuda, cuda.cuInit(0), "cuInit")
        _check(cuda, cuda.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
        _check(cuda, cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device), "cuCtxCreate")
        _check(cuda, cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(_BYTES)), "cuMemAlloc")
        _check(cuda, cuda.cuMemsetD8_v2(memory, ctypes.c_ubyte(0), ctypes.c_size_t(_BYTES)), "cuMemsetD8")
        _check(cuda, cuda.cuCtxSynchronize(), "cuCtxSynchronize")
        _check(cuda, cuda.cuMemFree_v2(memory), "cuMemFree")
        _check(cuda, cuda.cuCtxDestroy_v2(context), "cuCtxDestroy")
    except (_CudaError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps({"seconds": time.monotonic() - started}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
