"""The child that enters amdsmi: ``python -m changeover.machine.amd_probe`` prints one JSON reading and ends.

Written against amdsmi 7.0.2 (``amdsmi_interface.py``). Its Python part fits one version of ROCm's library, and comes
with it; so it is taken from ROCm's own folder where it is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

UUID_PREFIX = "AMD-"  # and then the PCI address: HIP finds a device by that
_MIB = 2**20
_ROCM_PYTHON = Path(os.environ.get("ROCM_PATH", "/opt/rocm")) / "share" / "amd_smi"
_CARDS = Path("/sys/class/drm")
_SERVES_MIB = 16 * 1024  # a card with less is there for its screen: a laptop's has 0.5 to 8 GiB


def main() -> int:
    print(json.dumps(_reading()))
    return 0


def _reading() -> dict[str, Any]:
    try:
        smi = _library()
    except (ImportError, OSError, KeyError, AttributeError) as error:  # none, or of another ROCm
        return _unread(f"{type(error).__name__}: {error}", _largest_mib())
    try:
        smi.amdsmi_init()
        gpus = [_read(smi, index, handle) for index, handle in enumerate(smi.amdsmi_get_processor_handles())]
    except smi.AmdSmiException as error:
        return {"presence": "unreadable", "gpus": [], "note": f"amdsmi: {_one_line(error)}"}
    if not gpus:
        return {"presence": "absent", "gpus": [], "note": "amdsmi counts no GPU"}
    return {"presence": "read", "gpus": gpus, "note": ""}


def _library() -> ModuleType:
    if importlib.util.find_spec("amdsmi") is None and (_ROCM_PYTHON / "amdsmi").is_dir():
        sys.path.append(str(_ROCM_PYTHON))
    return importlib.import_module("amdsmi")


def _unread(why: str, largest_mib: float) -> dict[str, Any]:
    """Without the library: a card that LLMs are served on must not pass for clean; a laptop's graphics may."""
    todo = f"pip install {_ROCM_PYTHON}"
    if largest_mib < _SERVES_MIB:
        note = f"AMD graphics of {largest_mib:.0f} MiB are not looked at (amdsmi cannot be loaded)"
        return {"presence": "absent", "gpus": [], "note": note}
    note = f"an AMD GPU of {largest_mib:.0f} MiB, and amdsmi cannot be loaded ({why}): {todo}"
    return {"presence": "unreadable", "gpus": [], "note": note}


def _largest_mib(cards: Path = _CARDS) -> float:
    """``mem_info_vram_total`` in bytes (Documentation/gpu/amdgpu/driver-misc.rst)."""
    found = [0]
    for path in cards.glob("card*/device/mem_info_vram_total"):
        try:
            found.append(int(path.read_text()))
        except (OSError, ValueError):
            continue
    return max(found) / _MIB


def _read(smi: ModuleType, index: int, handle: Any) -> dict[str, Any]:
    vram = smi.AmdSmiMemoryType.VRAM
    return {
        "uuid": f"{UUID_PREFIX}{smi.amdsmi_get_gpu_device_bdf(handle)}",
        "index": index,
        "name": _known(smi, lambda: smi.amdsmi_get_gpu_asic_info(handle)["market_name"]) or "AMD GPU",
        "total_mib": smi.amdsmi_get_gpu_memory_total(handle, vram) / _MIB,
        "used_mib": smi.amdsmi_get_gpu_memory_usage(handle, vram) / _MIB,
        "reserved_mib": 0.0,
        "memory_call": "amdsmi",
        "persistence": None,
        "processes": _processes(smi, handle),
        "health": _health(smi, handle),
        "mig": None,
        "vendor": "amd",
    }


def _processes(smi: ModuleType, handle: Any) -> list[dict[str, Any]]:
    """Without this process: reading memory opens /dev/kfd on MI300, and who has is listed (ROCm #4411)."""
    listed = smi.amdsmi_get_gpu_process_list(handle)
    return [
        {"pid": one["pid"], "used_mib": one["memory_usage"]["vram_mem"] / _MIB, "kind": "compute"}
        for one in listed
        if one["pid"] != os.getpid()
    ]


def _health(smi: ModuleType, handle: Any) -> list[str]:
    pages = _known(smi, lambda: smi.amdsmi_get_gpu_bad_page_info(handle)) or []
    status = smi.AmdSmiMemoryPageStatus
    pending = sum(page["status"] == status.PENDING for page in pages)
    lost = sum(page["status"] == status.UNRESERVABLE for page in pages)
    said = [f"{pending} bad pages wait for their retirement: reset the GPU"] if pending else []
    return said + ([f"{lost} bad pages cannot be retired"] if lost else [])


def _known(smi: ModuleType, call: Callable[[], Any]) -> Any:
    """A value, or None where this card, driver or user does not have it."""
    try:
        return call()
    except smi.AmdSmiLibraryException:
        return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
