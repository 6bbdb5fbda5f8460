"""Checking a states folder byte by byte: what is damaged, where, and which samples it costs.

Every byte of a shard is covered: records (padding too) by their hash, the header because it is a function of
the index lines. safetensors itself notices a truncated file and nothing else.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from changeover.states import layout, lines
from changeover.states.layout import Entry
from changeover.states.manifest import Manifest, read_manifest
from changeover.states.reader import read_record
from changeover.states.writer import INDEX_NAME, SHARDS_FOLDER, expected_sizes


@dataclass(frozen=True)
class Damage:
    """One thing that is not as it was written; ``sample``, ``shard`` and ``offset`` where they are known."""

    kind: str
    detail: str
    sample: str | None = None
    shard: str | None = None
    offset: int | None = None

    def __str__(self) -> str:
        place = [
            f"sample {self.sample!r}" if self.sample is not None else "",
            self.shard or "",
            f"byte {self.offset}" if self.offset is not None else "",
        ]
        return f"{self.kind}: {self.detail}" + "".join(f", {part}" for part in place if part)


@dataclass(frozen=True)
class Verification:
    """What was looked at and what was found."""

    samples: int
    hashed_samples: int
    hashed_bytes: int
    sealed: bool
    damages: tuple[Damage, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "damages": [asdict(damage) for damage in self.damages],
            "ok": not self.damages,
        }


def verify(
    root: Path,
    *,
    share: float = 1.0,
    seed: int = 0,
    on_record: Callable[[int, int], None] = lambda done, total: None,
) -> Verification:
    """Check index, shard sizes, headers and completeness; hash ``share`` of the records (a seeded choice).

    ``on_record`` is told (records done, records to do). Raises InvalidInput only where ``root`` is no states
    folder.
    """
    manifest = read_manifest(root)
    entries, damages = _read_lines(root)
    sizes = expected_sizes(entries)
    damages += _check_shards(root, manifest, entries, sizes)
    damages += _check_complete(manifest, entries)
    count = round(share * len(entries)) if share < 1 else len(entries)
    chosen = random.Random(seed).sample(entries, max(count, min(1, len(entries))))  # noqa: S311 - a sample, no secret chosen.sort(key=lambda entry: (entry.shard, entry.offset))
    hashed_bytes = 0
    for done, entry in enumerate(chosen, start=1):
        buffer = np.empty(entry.bytes, np.uint8)
        if wrong := read_record(root, entry, buffer.data):
            damages.append(Damage("record", wrong, entry.id, entry.shard, entry.offset))
        hashed_bytes += entry.bytes
        on_record(done, len(chosen))
    return Verification(len(entries), len(chosen), hashed_bytes, manifest.sealed, tuple(damages))


def ids_digest(ids: Iterable[str]) -> str:
    """sha256 of the sorted sample ids: what the manifest keeps of who is in the folder."""
    return hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest()


def _read_lines(root: Path) -> tuple[list[Entry], list[Damage]]:
    entries: list[Entry] = []
    damages: list[Damage] = []
    for line in lines.read_lines(root / INDEX_NAME):
        if line.value is None or line.torn:
            detail = line.damage or "the line has no end"
            damages.append(
                Damage("index line", f"line {line.number}: {detail}", shard=INDEX_NAME, offset=line.offset)
            )
        else:
            entries.append(Entry.from_json(line.value))
    return entries, damages


def _check_shards(
    root: Path, manifest: Manifest, entries: list[Entry], sizes: dict[str, int]
) -> list[Damage]:
    damages: list[Damage] = []
    by_shard: dict[str, list[Entry]] = {name: [] for name in sizes}
    for entry in entries:
        by_shard[entry.shard].append(entry)
    folder = root / SHARDS_FOLDER
    on_disk = {path.name for path in folder.glob("shard-*.safetensors")} if folder.is_dir() else set()
    for leftover in sorted(folder.glob(".*.partial")):
        damages.append(
            Damage("open shard", "left by a writer that is at work or was killed", shard=leftover.name)
        )
    for name in sorted(on_disk | set(sizes)):
        if name not in on_disk:
            damages.append(Damage("missing shard", f"it holds {len(by_shard[name])} samples", shard=name))
            continue
        path = folder / name
        with path.open("rb") as file:
            header = file.read(layout.HEADER_BYTES)
        try:
            listed = layout.entries_in_header(header)
        except (ValueError, KeyError, TypeError) as error:
            damages.append(Damage("shard header", str(error), shard=name, offset=0))
            continue
        known = {entry.id for entry in by_shard.get(name, [])}
        damages += [
            Damage("missing sample", "in the shard but not in the index", entry.id, name, entry.offset)
            for entry in listed
            if entry.id not in known
        ]
        indexed = sorted(by_shard.get(name, []), key=lambda entry: entry.offset)
        # Where index lines are missing, the header can be held against itself only.
        judged = indexed if known >= {entry.id for entry in listed} else listed
        if header != layout.build_header(judged, manifest):
            damages.append(Damage("shard header", "it is not the one of its samples", shard=name, offset=0))
        end = max((entry.offset + entry.bytes for entry in listed), default=layout.HEADER_BYTES)
        if path.stat().st_size != end:
            damages.append(Damage("shard size", f"{path.stat().st_size} bytes, expected {end}", shard=name))
    return damages


def _check_complete(manifest: Manifest, entries: list[Entry]) -> list[Damage]:
    """The sealed manifest knows how many samples there are, and the digest of their ids."""
    if not manifest.sealed:
        return []
    expected, actual = manifest.gate.get("samples"), len({entry.id for entry in entries})
    if expected != actual:
        return [
            Damage("count", f"the manifest says {expected} samples, the index has {actual}", shard=INDEX_NAME)
        ]
    if manifest.gate.get("ids_sha256") != ids_digest(entry.id for entry in entries):
        return [
            Damage("ids", "the samples are not those that the manifest was sealed with", shard=INDEX_NAME)
        ]
    return []
