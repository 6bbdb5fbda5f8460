"""Damage of every kind is found and named; a whole folder is not accused."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from changeover.states.layout import HEADER_BYTES
from changeover.states.store import StatesReader, StatesWriter
from changeover.states.verify import Damage, ids_digest, verify
from tests.states.samples import make_sample, small_manifest


@pytest.fixture
def states(tmp_path: Path) -> Path:
    root = tmp_path / "states"
    with StatesWriter.create(root, small_manifest(), shard_bytes=180_000) as writer:
        for i in range(12):
            writer.add(make_sample(f"s{i}", tokens=60))
        writer.commit_shard()
        writer.seal({"samples": 12, "ids_sha256": ids_digest(writer.committed)})
    return root


def damages(root: Path, share: float = 1.0) -> list[Damage]:
    return list(verify(root, share=share).damages)


def flip(path: Path, byte: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def test_a_whole_folder_is_whole(states: Path) -> None:
    found = verify(states)
    assert not found.damages
    assert (found.samples, found.hashed_samples, found.sealed) == (12, 12, True)
    assert len(list((states / "shards").iterdir())) > 2
    json.dumps(found.to_json(), allow_nan=False)


def test_any_flipped_bit_of_any_shard_is_found(states: Path) -> None:
    reader = StatesReader(states)
    owners = {i: reader.entry(i) for i in range(len(reader))}
    shards = sorted((states / "shards").iterdir())
    rng = random.Random(0)
    for shard in shards:
        size = shard.stat().st_size
        places = [0, 7, 8, 500, HEADER_BYTES - 1, HEADER_BYTES, size - 1]
        for place in places + [rng.randrange(size) for _ in range(15)]:
            flip(shard, place, bit := rng.randrange(8))
            found = damages(states)
            owner = [
                e for e in owners.values() if e.shard == shard.name and e.offset <= place < e.offset + e.bytes
            ]
            assert found, f"{shard.name} byte {place}"
            if owner:
                assert [(d.kind, d.sample, d.shard, d.offset) for d in found] == [
                    ("record", owner[0].id, shard.name, owner[0].offset)
                ]
            else:
                assert {(d.kind, d.shard) for d in found} == {("shard header", shard.name)}
            flip(shard, place, bit)
    assert not damages(states)


def test_a_truncated_shard_names_the_samples_it_costs(states: Path) -> None:
    reader = StatesReader(states)
    entry = reader.entry(1)
    os.truncate(states / "shards" / entry.shard, entry.offset + 10)
    found = damages(states)
    lost = {
        reader.entry(i).id
        for i in range(12)
        if reader.entry(i).shard == entry.shard and reader.entry(i).offset >= entry.offset
    }
    assert {d.sample for d in found if d.kind == "record"} == lost
    assert [d.shard for d in found if d.kind == "shard size"] == [entry.shard]
    assert "truncated" in next(d.detail for d in found if d.kind == "record")


def test_a_missing_shard_names_its_samples(states: Path) -> None:
    entry = StatesReader(states).entry(0)
    (states / "shards" / entry.shard).unlink()
    found = damages(states)
    assert ("missing shard", entry.shard) in {(d.kind, d.shard) for d in found}
    assert entry.id in {d.sample for d in found if d.kind == "record"}


@pytest.mark.parametrize("line", [0, 5, 11])
def test_a_damaged_index_line_is_named_with_its_sample(states: Path, line: int) -> None:
    index = states / "index.jsonl"
    lines = index.read_bytes().splitlines(True)
    start = sum(map(len, lines[:line]))
    flip(index, start + lines[line].index(b'"tokens":') + 9)
    found = damages(states)
    assert [(d.offset, f"line {line + 1}" in d.detail) for d in found if d.kind == "index line"] == [
        (start, True)
    ]
    assert [d.sample for d in found if d.kind == "missing sample"] == [f"s{line}"]
    assert "count" in {d.kind for d in found}


def test_a_removed_index_line_is_a_missing_sample(states: Path) -> None:
    lines = (states / "index.jsonl").read_bytes().splitlines(True)
    (states / "index.jsonl").write_bytes(b"".join(lines[:4] + lines[5:]))
    found = damages(states)
    assert [d.sample for d in found if d.kind == "missing sample"] == ["s4"]
    assert "count" in {d.kind for d in found}


def test_a_sample_gone_with_its_shard_and_line_is_missed_by_the_count(states: Path) -> None:
    last = StatesReader(states).entry(11).shard
    lines = [
        line for line in (states / "index.jsonl").read_bytes().splitlines(True) if last.encode() not in line
    ]
    (states / "index.jsonl").write_bytes(b"".join(lines))
    (states / "shards" / last).unlink()
    assert {d.kind for d in damages(states)} == {"count"}


def test_other_samples_in_the_same_number_are_noticed(states: Path) -> None:
    manifest = json.loads((states / "manifest.json").read_text())
    manifest["gate"]["ids_sha256"] = ids_digest([f"other{i}" for i in range(12)])
    (states / "manifest.json").write_text(json.dumps(manifest))
    assert [d.kind for d in damages(states)] == ["ids"]


def test_an_open_shard_is_named(states: Path) -> None:
    (states / "shards/.shard-00009.safetensors.partial").write_bytes(b"x")
    assert [(d.kind, d.shard) for d in damages(states)] == [
        ("open shard", ".shard-00009.safetensors.partial")
    ]


def test_a_share_hashes_that_many(states: Path) -> None:
    assert verify(states, share=0.25).hashed_samples == 3
    assert verify(states, share=0.0001).hashed_samples == 1
