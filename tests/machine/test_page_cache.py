"""Real files of a real file system, put out of the page cache and read into it again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from changeover.machine.page_cache import Cached, look, read_in, room_bytes

MIB = 2**20


def put_out(file: Path) -> None:
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def weights(tmp_path):
    """Two files on a disk, neither in memory."""
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file, mib in zip(files, (48, 20), strict=True):
        file.write_bytes(os.urandom(MIB) * mib + b"tail")
        put_out(file)
    if look(files).cached_bytes != 0:
        pytest.skip("this file system keeps its files in memory (tmpfs)")
    return files


def test_what_is_read_in_is_there_and_is_not_read_again(weights):
    size = sum(file.stat().st_size for file in weights)
    assert look(weights) == Cached(size, 0)
    seen = []
    assert read_in(weights, 10 * size, seen.append) == size
    assert look(weights) == Cached(size, size)
    assert seen == sorted(seen) and seen[-1] == size
    assert read_in(weights, 10 * size) == 0


def test_looking_reads_nothing_in(weights):
    for _ in range(3):
        look(weights)
    assert look(weights).cached_bytes == 0


def test_only_whole_files_that_fit_are_read(weights):
    first = weights[0].stat().st_size
    assert read_in(weights, first + 5 * MIB) == first
    assert look(weights[:1]).cached_bytes == first and look(weights[1:]).cached_bytes == 0


def test_files_that_cannot_be_read_are_left_to_who_needs_them(weights, tmp_path):
    missing = [tmp_path / "missing.safetensors", weights[1]]
    assert read_in(missing, 10**12) == weights[1].stat().st_size
    assert look(missing).bytes == weights[1].stat().st_size
    (tmp_path / "empty").touch()
    assert look([tmp_path / "empty"]) == Cached(0, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes somebody else")
def test_what_the_kernel_would_not_say_truly_is_not_asked(weights):
    program = (
        "import os; from pathlib import Path; from changeover.machine.page_cache import look\n"
        f"opened = os.open({str(weights[0])!r}, os.O_RDONLY); os.setuid(65534)\n"
        "print(look([Path(f'/proc/self/fd/{opened}')]))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said == f"Cached(bytes={weights[0].stat().st_size}, cached_bytes=None)\n"


def machine_of(tmp_path, **limits):
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  600 kB\n")
    for name, text in limits.items():
        (tmp_path / f"memory.{name}").write_text(text)
    return room_bytes(tmp_path, tmp_path)


def test_a_tenth_of_the_memory_is_left_alone(tmp_path):
    assert machine_of(tmp_path) == 500 * 1024
    assert machine_of(tmp_path, max="max\n", current="5\n", stat="") == 500 * 1024
    assert room_bytes() > 0  # this machine's own files are read too


def test_a_container_has_the_room_of_its_cgroup(tmp_path):
    limits = {"max": f"{300 * 1024}\n", "current": f"{250 * 1024}\n"}
    stat = f"anon 1\ninactive_file {40 * 1024}\nactive_file {20 * 1024}\n"
    assert machine_of(tmp_path, **limits, stat=stat) == 80 * 1024  # 300 - 250 + 60, less 30
    assert machine_of(tmp_path, **limits, stat="anon 1\n") == 20 * 1024
    full = {"max": "1000\n", "current": "1000\n", "stat": "anon 1000\n"}
    assert machine_of(tmp_path, **full) == 0
