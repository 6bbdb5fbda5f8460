"""The child that enters HIP: takes memory on the GPU at one PCI address, gives it back, ends. See ``context_probe``.

Calls: hip_runtime_api.h (ROCm 6 and 7). Never run on a card.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path

_BYTES = 64 * 2**20
_NAMES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")


class _HipError(Exception):
    pass


def _library() -> ctypes.CDLL:
    rocm = Path(os.environ.get("ROCM_PATH", "/opt/rocm")) / "lib" / _NAMES[0]
    for name in (*_NAMES, str(rocm)):
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            last = error
    raise last


def main(arguments: list[str]) -> int:
    (address,) = arguments
    started = time.monotonic()
    try:
        hip = _library()
        hip.hipGetErrorString.restype = ctypes.c_char_p

        def check(code: int, call: str) -> None:
            if code != 0:
                text = hip.hipGetErrorString(code) or b"unknown error"
                raise _HipError(f"{call}: {text.decode()} ({code})")

        device, memory, size = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t(_BYTES)
        check(hip.hipInit(0), "hipInit")
        found = hip.hipDeviceGetByPCIBusId(ctypes.byref(device), address.encode())
        check(found, f"hipDeviceGetByPCIBusId({address})")
        check(hip.hipSetDevice(device), "hipSetDevice")
        check(hip.hipMalloc(ctypes.byref(memory), size), "hipMalloc")
        check(hip.hipMemset(memory, 0, size), "hipMemset")
        check(hip.hipDeviceSynchronize(), "hipDeviceSynchronize")
        check(hip.hipFree(memory), "hipFree")
    except (_HipError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps({"seconds": time.monotonic() - started}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
