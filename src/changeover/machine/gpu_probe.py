"""The child that enters NVML: ``python -m changeover.machine.gpu_probe`` prints one JSON reading and ends.

With ``--serve`` it prints one for each line on its stdin, and ends with it.

Sources: NVML headers (nvml.h), nvidia-ml-py. A value that this driver does not know is None, never a guess.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pynvml

_MIB = 2**20
_RECOVERY_FIELD = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_RECOVERY_ACTIONS = {
    1: "GPU reset",
    2: "node reboot",
    3: "drain P2P",
    4: "drain and reset",
    5: "IMEX recovery",
    6: "bus reset",
    7: "system reboot",
}


def main(arguments: list[str]) -> int:
    questions = sys.stdin if arguments == ["--serve"] else ["once"]
    entered = False
    for _ in questions:
        try:
            if not entered:
                pynvml.nvmlInit()
                entered = True
            gpus, lost = _read_all(pynvml.nvmlDeviceGetCount())
            presence, note = ("read", "; ".join(lost)) if gpus else ("absent", "the driver counts no GPU")
            presence = "unreadable" if lost and not gpus else presence
        except pynvml.NVMLError as error:
            # The library is there (the caller looked), so a driver that does not answer is no proof of absence.
            presence, gpus, note = "unreadable", [], f"NVML: {error}"
        print(json.dumps({"presence": presence, "gpus": gpus, "note": note}), flush=True)
    return 0


def _read(index: int) -> dict[str, Any]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return {
        "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
        "index": index,
        "name": _text(pynvml.nvmlDeviceGetName(handle)),
        **_memory(handle),
        "persistence": _known(lambda: bool(pynvml.nvmlDeviceGetPersistenceMode(handle))),
        "processes": _processes(handle),
        "health": _health(handle),
        "mig": _known(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE),
    }


def _read_all(count: int) -> tuple[list[dict[str, Any]], list[str]]:
    """One GPU that fell off the bus, or wants a reset, must not hide the others: it is named."""
    gpus, lost = [], []
    for index in range(count):
        try:
            gpus.append(_read(index))
        except (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_ResetRequired) as error:
            lost.append(f"GPU {index}: {error}")
    return gpus, lost


def _memory(handle: Any) -> dict[str, Any]:
    try:
        info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        reserved, call = info.reserved, "v2"
    except pynvml.NVMLError_FunctionNotFound:
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
        reserved, call = 0, "v1"
    used = max(info.total - info.free - reserved, 0)
    return {
        "total_mib": info.total / _MIB,
        "used_mib": used / _MIB,
        "reserved_mib": reserved / _MIB,
        "memory_call": call,
    }


def _processes(handle: Any) -> list[dict[str, Any]]:
    calls = {
        "compute": pynvml.nvmlDeviceGetComputeRunningProcesses,
        "graphics": pynvml.nvmlDeviceGetGraphicsRunningProcesses,
        "mps": pynvml.nvmlDeviceGetMPSComputeRunningProcesses,
    }
    found = []
    for kind, call in calls.items():
        for process in _known(partial(call, handle)) or []:
            used = process.usedGpuMemory
            found.append(
                {"pid": process.pid, "used_mib": None if used is None else used / _MIB, "kind": kind}
            )
    return found


def _health(handle: Any) -> list[str]:
    said = []
    remapped = _known(lambda: pynvml.nvmlDeviceGetRemappedRows(handle))
    if remapped is not None:
        _, _, pending, failed = remapped
        said += ["a row remap is pending: reset the GPU"] if pending else []
        said += ["a row remap failed"] if failed else []
    if _known(lambda: pynvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)):
        said.append("page retirement is pending: reboot")
    action = _recovery_action(handle)
    if action:
        said.append(f"the driver asks for: {_RECOVERY_ACTIONS.get(action, f'action {action}')}")
    return said


def _recovery_action(handle: Any) -> int | None:
    values = _known(lambda: pynvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_FIELD]))
    if not values or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    return int(values[0].value.uiVal)


def _known(call: Callable[[], Any]) -> Any:
    """A value, or None where this driver or GPU does not have it; a lost GPU is an error, not an unknown."""
    try:
        return call()
    except (
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_NoPermission,
        pynvml.NVMLError_InvalidArgument,
    ):
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
