"""AMD GPUs without one: the probes on the real ``amdsmi`` with a made-up C library below it (``fake_drivers``)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from changeover.machine import amd_gpus, amd_probe
from changeover.machine.amd_gpus import no_amd_driver, read_amd, read_hip_context
from changeover.machine.bounded import Answer, BoundedResult
from changeover.machine.gpus import GpuFacts, GpuProcess, GpuReading, Presence, joined
from changeover.machine.local import LocalMachine

DRIVERS = Path(__file__).parent / "fake_drivers"


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with the compute driver, two MI300X, the second in use by pid 4242."""
    monkeypatch.setenv("PYTHONPATH", str(DRIVERS))
    monkeypatch.setattr(amd_gpus, "no_amd_driver", lambda: False)
    return monkeypatch


def test_memory_and_processes_of_each_card_without_the_reader_itself(rocm: pytest.MonkeyPatch) -> None:
    """Reading memory opens /dev/kfd on MI300, and whoever has done that is listed (ROCm #4411)."""
    reading = read_amd(60.0)
    assert reading.presence is Presence.READ, reading.note
    idle, busy = reading.gpus
    assert (idle.uuid, busy.uuid) == ("AMD-0000:05:00.0", "AMD-0000:06:00.0")
    assert (idle.vendor, idle.memory_call, idle.name) == ("amd", "amdsmi", "AMD Instinct MI300X")
    assert (idle.used_mib, idle.total_mib, idle.processes) == (283.0, 196_592.0, ())
    assert busy.used_mib == 90_000.0 and busy.processes == (GpuProcess(4242, 89_000.0, "compute"),)
    assert idle.health == () == busy.health


def test_a_card_that_does_not_tell_its_name_is_read_all_the_same(rocm: pytest.MonkeyPatch) -> None:
    rocm.setenv("FAKE_DRIVER", "nameless")
    assert [gpu.name for gpu in read_amd(60.0).gpus] == ["AMD GPU", "AMD GPU"]


def test_bad_pages_are_said(rocm: pytest.MonkeyPatch) -> None:
    rocm.setenv("FAKE_DRIVER", "sick")
    pending, lost = read_amd(60.0).gpus[0].health
    assert "1 bad pages wait" in pending and "2 bad pages cannot" in lost


@pytest.mark.parametrize("mode", ["no driver", "no permission"])
def test_a_library_that_does_not_answer_is_no_absence(rocm: pytest.MonkeyPatch, mode: str) -> None:
    rocm.setenv("FAKE_DRIVER", mode)
    reading = read_amd(60.0)
    assert reading.presence is Presence.UNREADABLE and "AMDSMI_STATUS" in reading.note
    assert "\n" not in reading.note


def test_no_card_at_all(rocm: pytest.MonkeyPatch) -> None:
    rocm.setenv("FAKE_DRIVER", "no card")
    assert read_amd(60.0).presence is Presence.ABSENT


def test_the_real_bindings_without_their_library_say_what_to_install(rocm: pytest.MonkeyPatch) -> None:
    """They print to stdout before they fail; what is said then depends on the card (below)."""
    rocm.setenv("FAKE_DRIVER", "no library")
    reading = read_amd(60.0)
    assert reading.presence is Presence.ABSENT and "amdsmi cannot be loaded" in reading.note


@pytest.mark.parametrize(
    ("mib", "presence"), [(512, "absent"), (8_192, "absent"), (24_576, "unreadable"), (196_592, "unreadable")]
)
def test_without_amdsmi_a_card_for_llms_is_unverified_and_a_laptops_graphics_are_not(
    tmp_path: Path, mib: int, presence: str
) -> None:
    card = tmp_path / "card1" / "device"
    card.mkdir(parents=True)
    (card / "mem_info_vram_total").write_text(f"{mib * 2**20}\n")
    (tmp_path / "card0" / "device").mkdir(parents=True)
    said = amd_probe._unread("KeyError: it", amd_probe._largest_mib(tmp_path))
    assert said["presence"] == presence and f"{mib} MiB" in said["note"]


def test_rocms_own_copy_of_amdsmi_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "amdsmi"
    folder.mkdir()
    (folder / "__init__.py").write_text("ITS = 'ROCm'\n")
    monkeypatch.setattr(amd_probe, "_ROCM_PYTHON", tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    monkeypatch.delitem(__import__("sys").modules, "amdsmi", raising=False)
    library = amd_probe._library()
    monkeypatch.delitem(__import__("sys").modules, "amdsmi")
    assert library.ITS == "ROCm"


def test_a_context_is_made_at_the_cards_own_address(rocm: pytest.MonkeyPatch) -> None:
    rocm.setenv("HIP_VISIBLE_DEVICES", "3")  # the user's own: must not hide the card from us
    reading = read_hip_context("AMD-0000:05:00.0", 60.0)
    assert reading.ok and reading.answered, reading.note
    other = read_hip_context("AMD-0000:99:00.0", 60.0)
    assert not other.ok and "invalid device ordinal" in other.note


def test_a_card_that_gives_no_memory_is_a_failure(rocm: pytest.MonkeyPatch) -> None:
    rocm.setenv("FAKE_DRIVER", "full")
    reading = read_hip_context("AMD-0000:05:00.0", 60.0)
    assert reading.answered and not reading.ok and "hipMalloc: out of memory (2)" in reading.note


@pytest.mark.parametrize(
    "result",
    [
        BoundedResult(Answer.TIMEOUT, "", "no answer in 1.0 s"),
        BoundedResult(Answer.FAILED, "", "exit 1"),
        BoundedResult(Answer.GIVEN, "", ""),
        BoundedResult(Answer.GIVEN, "nonsense\n[]", ""),
    ],
)
def test_no_answer_or_nonsense_is_unreadable(rocm: pytest.MonkeyPatch, result: BoundedResult) -> None:
    rocm.setattr(amd_gpus, "run_probe", lambda *_args, **_more: result)
    assert read_amd(1.0).presence is Presence.UNREADABLE


def test_without_the_compute_driver_no_child_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_args: Any, **_more: Any) -> BoundedResult:
        raise AssertionError("a child was started")

    monkeypatch.setattr(amd_gpus, "run_probe", started)
    monkeypatch.setattr(amd_gpus, "no_amd_driver", lambda: no_amd_driver(tmp_path / "kfd"))
    assert read_amd(1.0).presence is Presence.ABSENT


def test_a_machine_reads_both_makers(rocm: pytest.MonkeyPatch) -> None:
    assert {gpu.vendor for gpu in LocalMachine().gpus(60.0).gpus} == {"amd"}
    (context,) = LocalMachine().fresh_contexts(["AMD-0000:05:00.0"], 60.0)
    assert context.ok


def test_one_maker_never_hides_the_other() -> None:
    gpu = GpuFacts("GPU-0", 0, "H200", 143_771.0, 4.0, 615.0, "v2", persistence=True, processes=())
    absent, read = GpuReading(Presence.ABSENT, note="no GPU present"), GpuReading(Presence.READ, (gpu,))
    sick, laptop = GpuReading(Presence.UNREADABLE, note="sick"), GpuReading(Presence.ABSENT, note="graphics")
    assert joined(absent, absent) == absent and joined(read, absent) == read == joined(absent, read)
    assert joined(absent, sick) == sick == joined(sick, absent)
    assert joined(read, sick) == GpuReading(Presence.UNREADABLE, (gpu,), "sick") == joined(sick, read)
    assert joined(absent, laptop).note == "no GPU present; graphics"
    assert len(joined(read, read).gpus) == 2


def test_the_probe_is_one_line_of_json(rocm: pytest.MonkeyPatch) -> None:
    result = amd_gpus.run_probe("changeover.machine.amd_probe", timeout_s=60.0)
    (line,) = result.output.splitlines()
    assert json.loads(line)["presence"] == "read" and os.environ["PYTHONPATH"] == str(DRIVERS)
