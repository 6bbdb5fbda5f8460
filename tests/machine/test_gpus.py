"""GPUs without a GPU: the probe on a made-up NVML, the readings, and what happens where there is none."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from changeover.machine import gpu_reader, gpus
from changeover.machine.bounded import Answer, BoundedResult, run_probe
from changeover.machine.gpu_reader import GpuReader
from changeover.machine.gpus import (
    GpuProcess,
    Presence,
    no_nvidia_driver,
    parse_reading,
    read_nvidia,
)

# The parts of nvidia-ml-py that the probe uses, with an idle H200's figures (driver 580: v1 counts the
# reserve).
FAKE_NVML = """
from types import SimpleNamespace as N
class NVMLError(Exception): pass
class NVMLError_FunctionNotFound(NVMLError): pass
class NVMLError_NotSupported(NVMLError): pass
class NVMLError_NoPermission(NVMLError): pass
class NVMLError_InvalidArgument(NVMLError): pass
class NVMLError_GpuIsLost(NVMLError): pass
class NVMLError_ResetRequired(NVMLError): pass
nvmlMemory_v2, NVML_SUCCESS, MIB, NVML_DEVICE_MIG_ENABLE = 2, 0, 2**20, 1
def nvmlDeviceGetMigMode(handle): return (1 if MODE == "mig" else 0, 0)
def nvmlInit():
    if MODE == "no driver": raise NVMLError("Driver Not Loaded")
def nvmlDeviceGetCount(): return {"empty": 0, "one lost": 2}.get(MODE, 1)
def nvmlDeviceGetHandleByIndex(index):
    if MODE == "lost" or (MODE == "one lost" and index == 1): raise NVMLError_GpuIsLost("GPU is lost")
    return index
def nvmlDeviceGetUUID(handle): return "GPU-abc"
def nvmlDeviceGetName(handle): return b"NVIDIA H200"
def nvmlDeviceGetMemoryInfo(handle, version=None):
    if version == 2 and MODE != "old driver":
        return N(total=143771*MIB, free=143156*MIB, used=0, reserved=615*MIB)
    if version == 2: raise NVMLError_FunctionNotFound()
    return N(total=143771*MIB, free=143156*MIB, used=615*MIB)
def nvmlDeviceGetPersistenceMode(handle): return 1
def nvmlDeviceGetComputeRunningProcesses(handle): return [N(pid=7, usedGpuMemory=None)]
def nvmlDeviceGetGraphicsRunningProcesses(handle): raise NVMLError_NotSupported()
def nvmlDeviceGetMPSComputeRunningProcesses(handle): return [N(pid=8, usedGpuMemory=2*MIB)]
def nvmlDeviceGetRemappedRows(handle): return (0, 0, 1 if MODE == "sick" else 0, 0)
def nvmlDeviceGetRetiredPagesPendingStatus(handle): raise NVMLError_NotSupported()
def nvmlDeviceGetFieldValues(handle, fields):
    assert fields == [230]
    return [N(nvmlReturn=0, value=N(uiVal=1 if MODE == "sick" else 0))]
"""


def probe(tmp_path: Path, mode: str = "") -> gpus.GpuReading:
    (tmp_path / "pynvml.py").write_text(f"MODE = {mode!r}\n{FAKE_NVML}")
    result = run_probe("changeover.machine.gpu_probe", timeout_s=60.0, env={"PYTHONPATH": str(tmp_path)})
    assert result.answer is Answer.GIVEN, result.note
    return parse_reading(json.loads(result.output))


def test_an_idle_gpu_reads_zero_although_v1_counts_the_reserve(tmp_path: Path) -> None:
    (gpu,) = probe(tmp_path).gpus
    assert (gpu.uuid, gpu.name, gpu.used_mib, gpu.reserved_mib) == ("GPU-abc", "NVIDIA H200", 0.0, 615.0)
    assert gpu.memory_call == "v2" and gpu.persistence is True and gpu.health == ()


def test_compute_and_mps_lists_are_both_read_and_a_missing_list_is_no_error(tmp_path: Path) -> None:
    (gpu,) = probe(tmp_path).gpus
    assert gpu.processes == (GpuProcess(7, None, "compute"), GpuProcess(8, 2.0, "mps"))


def test_an_old_driver_is_read_by_v1_and_says_so(tmp_path: Path) -> None:
    (gpu,) = probe(tmp_path, "old driver").gpus
    assert gpu.memory_call == "v1" and gpu.used_mib == 615.0


def test_a_sick_gpu_says_what_it_asks_for(tmp_path: Path) -> None:
    (gpu,) = probe(tmp_path, "sick").gpus
    assert "remap" in gpu.health[0] and "GPU reset" in gpu.health[1]


@pytest.mark.parametrize(
    ("mode", "presence"),
    [("no driver", Presence.UNREADABLE), ("lost", Presence.UNREADABLE), ("empty", Presence.ABSENT)],
)
def test_a_driver_that_does_not_answer_is_no_absence(tmp_path: Path, mode: str, presence: Presence) -> None:
    assert probe(tmp_path, mode).presence is presence


def test_a_gpu_that_fell_off_the_bus_does_not_hide_the_others(tmp_path: Path) -> None:
    reading = probe(tmp_path, "one lost")
    assert [gpu.uuid for gpu in reading.gpus] == ["GPU-abc"] and reading.note == "GPU 1: GPU is lost"


def test_mig_is_said(tmp_path: Path) -> None:
    assert [probe(tmp_path, mode).gpus[0].mig for mode in ("", "mig")] == [False, True]


def test_absence_needs_both_device_and_library_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "nvidiactl"

    def missing(_name: str) -> None:
        raise OSError("no such library")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert no_nvidia_driver(device)
    device.touch()
    assert not no_nvidia_driver(device)
    device.unlink()
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: object())
    assert not no_nvidia_driver(device)


def test_where_there_is_no_gpu_no_child_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_args: Any, **_more: Any) -> BoundedResult:
        raise AssertionError("a child was started")

    monkeypatch.setattr(gpus, "no_nvidia_driver", lambda: True)
    monkeypatch.setattr(gpus, "run_probe", started)
    assert read_nvidia(1.0).presence is Presence.ABSENT


@pytest.mark.parametrize(
    "result",
    [
        BoundedResult(Answer.TIMEOUT, "", "no answer in 1.0 s"),
        BoundedResult(Answer.FAILED, "", "exit 1"),
        BoundedResult(Answer.GIVEN, "not json", ""),
        BoundedResult(Answer.GIVEN, '{"presence": "read"}', ""),
    ],
)
def test_no_answer_or_nonsense_is_unreadable(monkeypatch: pytest.MonkeyPatch, result: BoundedResult) -> None:
    monkeypatch.setattr(gpus, "no_nvidia_driver", lambda: False)
    monkeypatch.setattr(gpus, "run_probe", lambda *_args, **_more: result)
    assert read_nvidia(1.0).presence is Presence.UNREADABLE


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuReader]:
    """A reader on a box that seems to have a GPU, whose NVML is the made-up one (MODE is set by the test)."""
    monkeypatch.setattr(gpu_reader, "no_nvidia_driver", lambda: False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one = GpuReader()
    yield one
    one.close()


def test_a_reader_answers_again_and_again_from_one_child(reader: GpuReader, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(f"MODE = ''\n{FAKE_NVML}")
    assert reader.read(60.0).gpus[0].used_mib == 0.0
    first = reader._child
    for _ in range(20):
        assert reader.read(60.0).presence is Presence.READ
    assert reader._child is first and first is not None
    reader.close()
    assert first.returncode is not None, "no child is left behind"


def test_gpud_117_a_reader_whose_driver_hangs_says_so_in_time_and_leaves_no_child(
    reader: GpuReader, tmp_path: Path
) -> None:
    (tmp_path / "pynvml.py").write_text(
        f"MODE = ''\n{FAKE_NVML}\nimport time\ndef nvmlInit(): time.sleep(3600)\n"
    )
    child = reader._running()
    assert reader.read(1.0).note == "NVML: no answer in 1.0 s"
    assert child.returncode is not None and reader._child is None
    (tmp_path / "pynvml.py").write_text(f"MODE = ''\n{FAKE_NVML}")
    assert reader.read(60.0).presence is Presence.READ, "the next question starts anew"


def test_a_reader_whose_probe_dies_says_so(reader: GpuReader, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("raise SystemExit(3)")
    reading = reader.read(60.0)
    assert reading.presence is Presence.UNREADABLE and "NVML" in reading.note
