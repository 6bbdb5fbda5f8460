"""The store: what is committed is whole and stays; what is not committed is absent."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from changeover.machine import durable
from changeover.machine.errors import InvalidInput
from changeover.states import layout
from changeover.states.store import StatesReader, StatesWriter, StoreBusy, StoreDamaged, StoreFull
from tests.states.samples import BOUNDARIES, HIDDEN, assert_same, make_sample, small_manifest


def write(root: Path, samples: list, **options: object) -> None:
    with StatesWriter.create(root, small_manifest(**options)) as writer:
        for sample in samples:
            writer.add(sample)


@pytest.mark.parametrize("codec", ["none", "bytesplit-zstd1"])
def test_what_was_written_is_read(tmp_path: Path, codec: str) -> None:
    samples = [make_sample(f"s{i}", tokens=3 + 7 * i, prompt_tokens=2) for i in range(9)]
    write(tmp_path / "states", samples, codec=codec)
    reader = StatesReader(tmp_path / "states")
    assert reader.ids == [sample.id for sample in samples]
    for position, sample in enumerate(samples):
        assert_same(reader.read(position), sample)
        entry = reader.entry(position)
        assert (entry.tokens, entry.prompt_tokens) == (sample.tokens, 2)
        assert entry.supervised_tokens == sample.tokens - 2
        assert entry.offset % 4096 == 0 and entry.bytes % 4096 == 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=12),
    codec=st.sampled_from(["none", "bytesplit-zstd1"]),
    shard_bytes=st.integers(1, 300_000),
    bits=st.integers(0, 0x7F7F),
)
def test_any_samples_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, shapes: list, codec: str, shard_bytes: int, bits: int
) -> None:
    root = tmp_path_factory.mktemp("store") / "states"
    samples = [
        make_sample(f"ü-{i}", tokens, min(prompt, tokens)) for i, (tokens, prompt) in enumerate(shapes)
    ]
    samples[0].last[0, 0] = bits
    with StatesWriter.create(root, small_manifest(codec=codec), shard_bytes=shard_bytes) as writer:
        for sample in samples:
            writer.add(sample)
    reader = StatesReader(root)
    assert len(reader) == len(samples)
    for position, sample in enumerate(samples):
        assert_same(reader.read(position), sample)
    with StatesWriter.resume(root) as writer:
        assert list(writer.committed) == [sample.id for sample in samples]


def test_a_shard_is_a_safetensors_file(tmp_path: Path) -> None:
    samples = [make_sample(f"s{i}", tokens=10 + i) for i in range(3)]
    write(tmp_path / "states", samples)
    with safe_open(tmp_path / "states/shards/shard-00000.safetensors", "np") as shard:
        for sample in samples:
            np.testing.assert_array_equal(shard.get_tensor(f"{sample.id}.input_ids"), sample.input_ids)
            np.testing.assert_array_equal(shard.get_tensor(f"{sample.id}.loss_mask"), sample.loss_mask)
            assert shard.get_slice(f"{sample.id}.aux").get_shape() == [sample.tokens, len(BOUNDARIES), HIDDEN]
            assert shard.get_slice(f"{sample.id}.aux").get_dtype() == "BF16"


def test_torch_reads_the_same_bf16(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    sample = make_sample("s")
    write(tmp_path / "states", [sample])
    with safe_open(tmp_path / "states/shards/shard-00000.safetensors", "pt") as shard:
        last = shard.get_tensor("s.last")
    assert last.dtype == torch.bfloat16
    np.testing.assert_array_equal(last.view(torch.uint16).numpy(), sample.last)


def test_shards_are_closed_at_their_size_and_before_their_header_is_full(tmp_path: Path) -> None:
    with StatesWriter.create(tmp_path / "by-size", small_manifest(), shard_bytes=400_000) as writer:
        for i in range(20):
            writer.add(make_sample(f"s{i}", tokens=300))
    sizes = [path.stat().st_size for path in (tmp_path / "by-size/shards").iterdir()]
    assert len(sizes) > 2 and max(sizes) <= 400_000
    long_name = "x" * 240
    with StatesWriter.create(tmp_path / "by-header", small_manifest()) as writer:
        for i in range(120):
            writer.add(make_sample(f"{long_name}{i}", tokens=2))
    assert len(list((tmp_path / "by-header/shards").iterdir())) > 1
    assert len(StatesReader(tmp_path / "by-header")) == 120


@pytest.mark.parametrize("name", ["aux", "last"])
@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81])
def test_nan_and_infinity_are_never_stored(tmp_path: Path, name: str, bits: int) -> None:
    sample = make_sample("s")
    getattr(sample, name).reshape(-1)[-1] = bits
    with StatesWriter.create(tmp_path / "states", small_manifest()) as writer:
        with pytest.raises(InvalidInput, match="NaN or infinity"):
            writer.add(sample)
        getattr(sample, name).reshape(-1)[-1] = 0x7F7F  # the largest finite bf16
        writer.add(sample)


def test_rows_without_a_token_are_refused(tmp_path: Path) -> None:
    sample = make_sample("s", tokens=12)
    padded = layout.Sample("p", sample.input_ids[:10], sample.loss_mask[:10], sample.aux, sample.last)
    with StatesWriter.create(tmp_path / "states", small_manifest()) as writer:
        with pytest.raises(InvalidInput, match="padding"):
            writer.add(padded)
        with pytest.raises(InvalidInput, match="one sample an id"):
            writer.add(sample), writer.add(sample)


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    with StatesWriter.create(tmp_path / "states", small_manifest()) as writer:
        writer.add(make_sample("s"))
        with pytest.raises(StoreBusy, match=str(os.getpid())):
            StatesWriter.resume(tmp_path / "states")
    StatesWriter.resume(tmp_path / "states").close()


def test_other_states_do_not_go_into_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "states", [make_sample("s")])
    with pytest.raises(InvalidInput, match="boundaries"):
        StatesWriter.open(tmp_path / "states", small_manifest(boundaries=(1, 2, 3)))
    with StatesWriter.open(tmp_path / "states", small_manifest()) as writer:
        assert list(writer.committed) == ["s"]


def test_a_reader_is_shared_by_threads_and_pickles(tmp_path: Path) -> None:
    samples = [make_sample(f"s{i}", tokens=40) for i in range(30)]
    write(tmp_path / "states", samples)
    reader = pickle.loads(pickle.dumps(StatesReader(tmp_path / "states")))
    with ThreadPoolExecutor(4) as pool:
        for sample, read in zip(samples * 3, pool.map(reader.read, list(range(30)) * 3), strict=True):
            assert_same(read, sample)


def test_a_flipped_bit_is_noticed_on_read(tmp_path: Path) -> None:
    write(tmp_path / "states", [make_sample(f"s{i}") for i in range(3)])
    reader = StatesReader(tmp_path / "states")
    entry = reader.entry(1)
    shard = tmp_path / "states/shards" / entry.shard
    content = bytearray(shard.read_bytes())
    content[entry.offset + 100] ^= 1
    shard.write_bytes(content)
    reader.read(0), reader.read(2)
    with pytest.raises(StoreDamaged, match="s1"):
        reader.read(1)


# -- crashes -------------------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from changeover.states.store import StatesWriter
from tests.states.samples import make_sample, small_manifest
writer = StatesWriter.open(Path(sys.argv[1]), small_manifest(), shard_bytes=200_000)
print("open", flush=True)
for i in range(100_000):
    if f"s{i}" not in writer.committed:
        writer.add(make_sample(f"s{i}", tokens=100))
        print(len(writer.committed), flush=True)
"""


def test_kill_9_loses_at_most_the_open_shard(tmp_path: Path) -> None:
    root = tmp_path / "states"
    committed = 0
    for round_number in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(root)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(60 + 17 * round_number):
            line = process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().splitlines()
        process.wait()
        said = int(([line.strip(), *rest])[-1])
        with StatesWriter.resume(root) as writer:
            entries = dict(writer.committed)
        assert len(entries) >= said >= committed
        committed = len(entries)
        assert not list(root.rglob("*.partial"))
        reader = StatesReader(root)
        for position in range(len(reader)):
            assert_same(reader.read(position), make_sample(reader.ids[position], tokens=100))
    assert committed > 150


@pytest.mark.parametrize("kept_share", [0.0, 0.3, 0.99])
def test_a_shard_renamed_but_not_wholly_indexed_is_taken_up(tmp_path: Path, kept_share: float) -> None:
    """A crash between the rename and the end of the append: the shard's header has the lines that are missing."""
    root = tmp_path / "states"
    samples = [make_sample(f"s{i}", tokens=50) for i in range(20)]
    with StatesWriter.create(root, small_manifest(), shard_bytes=180_000) as writer:
        for sample in samples:
            writer.add(sample)
    last_shard = max(path.name for path in (root / "shards").iterdir()).encode()
    lines = (root / "index.jsonl").read_bytes().splitlines(True)
    before = b"".join(line for line in lines if last_shard not in line)
    torn = b"".join(line for line in lines if last_shard in line)
    (root / "index.jsonl").write_bytes(before + torn[: int(kept_share * len(torn))])
    StatesWriter.resume(root).close()
    reader = StatesReader(root)
    assert sorted(reader.ids) == sorted(sample.id for sample in samples)
    for sample in samples:
        assert_same(reader.read(reader.position(sample.id)), sample)


def test_a_damaged_index_line_is_an_error_not_a_gap(tmp_path: Path) -> None:
    root = tmp_path / "states"
    write(root, [make_sample(f"s{i}") for i in range(5)])
    content = (root / "index.jsonl").read_text().splitlines(True)
    content[2] = content[2].replace('"tokens":12', '"tokens":13')
    (root / "index.jsonl").write_text("".join(content))
    with pytest.raises(StoreDamaged, match="line 3"):
        StatesReader(root)
    with pytest.raises(StoreDamaged, match="line 3"):
        StatesWriter.resume(root)


def test_a_truncated_shard_is_noticed_on_resume(tmp_path: Path) -> None:
    write(tmp_path / "states", [make_sample(f"s{i}") for i in range(5)])
    shard = tmp_path / "states/shards/shard-00000.safetensors"
    os.truncate(shard, shard.stat().st_size - 4096)
    with pytest.raises(StoreDamaged, match="shard-00000"):
        StatesWriter.resume(tmp_path / "states")


# -- a full disk ---------------------------------------------------------------------------------------------


class FullDisk:
    """Stands for os.pwritev on a disk with ``room`` bytes: writes what fits, then ENOSPC."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.real = os.pwritev

    def __call__(self, fd: int, buffers: list, offset: int) -> int:
        growth = max(0, offset + sum(len(b) for b in buffers) - os.fstat(fd).st_size)
        if growth > self.room:
            if self.room == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            part = bytes(b"".join(buffers))[: self.room]
            self.room = 0
            return self.real(fd, [part], offset)
        self.room -= growth
        return self.real(fd, buffers, offset)


def fill(writer: StatesWriter, added: list[str]) -> None:
    for i in range(1000):
        writer.add(make_sample(f"s{i}", tokens=70))
        added.append(f"s{i}")


@pytest.mark.parametrize("room", [0, 1000, 131072, 140000, 200_000, 333_333, 500_000])
def test_a_full_disk_leaves_a_store_that_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    root = tmp_path / "states"
    write(root, [make_sample(f"first{i}") for i in range(3)])
    writer = StatesWriter.resume(root, shard_bytes=250_000)
    added = []
    with monkeypatch.context() as patch:
        patch.setattr(durable.os, "pwritev", FullDisk(room))
        with pytest.raises(StoreFull, match="committed"):
            fill(writer, added)
    writer.close()  # there is room again: what was complete is committed
    with StatesWriter.resume(root) as again:
        assert set(again.committed) == {"first0", "first1", "first2", *added}
        again.add(make_sample("after"))
    reader = StatesReader(root)
    for position, name in enumerate(reader.ids):
        assert reader.read(position).id == name


def test_a_full_disk_at_the_close_keeps_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "states"
    write(root, [make_sample("first")])
    writer = StatesWriter.resume(root)
    writer.add(make_sample("second"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        with pytest.raises(StoreFull):
            writer.close()
    with StatesWriter.resume(root) as again:
        assert list(again.committed) == ["first"]
        assert not list(root.rglob("*.partial"))
