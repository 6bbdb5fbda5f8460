"""Shared memory is looked at, never attached."""

from __future__ import annotations

from multiprocessing import shared_memory
from pathlib import Path

from changeover.machine.shm import Segment, read_segments, unlink_segment


def test_cpython_104291_looking_does_not_remove() -> None:
    """cpython #104291, #82300, #153279: attaching to a segment and ending unlinks it."""
    segment = shared_memory.SharedMemory(create=True, size=1 << 16)
    path = Path("/dev/shm") / segment.name
    try:
        assert str(path) in {one.path for one in read_segments()}
        assert path.exists()
    finally:
        segment.close()
        segment.unlink()
    assert str(path) not in {one.path for one in read_segments()}


def test_folders_are_walked_and_links_not_followed(tmp_path: Path) -> None:
    (tmp_path / "states").mkdir()
    (tmp_path / "states" / "a").write_bytes(b"x" * 8192)
    (tmp_path / "loop").symlink_to(tmp_path)
    found = {segment.path: facts for segment, facts in read_segments(tmp_path).items()}
    assert set(found) == {str(tmp_path / "states" / "a"), str(tmp_path / "loop")}
    assert found[str(tmp_path / "states" / "a")].used_mib > 0


def test_a_root_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert read_segments(tmp_path / "none") == {}


def test_only_the_very_same_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "nccl-x"
    path.touch()
    (segment,) = read_segments(tmp_path)
    assert not unlink_segment(Segment(segment.path, segment.inode + 1)) and path.exists()
    assert unlink_segment(segment) and not path.exists()
    assert not unlink_segment(segment)
