"""Reading a states folder: one ``preadv`` a sample, hash checked each time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from changeover.machine import durable
from changeover.machine.errors import InvalidInput
from changeover.states import layout
from changeover.states.errors import StoreDamaged
from changeover.states.layout import Entry, Sample
from changeover.states.manifest import read_manifest
from changeover.states.writer import SHARDS_FOLDER, read_index


class StatesReader:
    """Random access to the committed samples of a folder, as it was when opened.

    No file stays open, so that a reader can be shared by threads, forked and pickled; the cost of an ``open``
    is some ten microseconds. Raises InvalidInput (not a states folder), StoreDamaged (a damaged index).
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.manifest = read_manifest(self.root)
        self._entries = list(read_index(self.root).values())
        self._positions = {entry.id: position for position, entry in enumerate(self._entries)}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sample]:
        return (self.read(position) for position in range(len(self)))

    @property
    def ids(self) -> list[str]:
        """Sample ids in the order of ``read``."""
        return [entry.id for entry in self._entries]

    def entry(self, position: int) -> Entry:
        """The facts of a sample without reading it (token counts, bytes, place)."""
        return self._entries[position]

    def position(self, sample_id: str) -> int:
        """Where ``sample_id`` stands. Raises InvalidInput where it is not in the folder."""
        try:
            return self._positions[sample_id]
        except KeyError as error:
            raise InvalidInput(
                expected=f"a sample of {self.root}", seen=repr(sample_id), todo="See 'ids' or index.jsonl."
            ) from error

    def read(self, position: int) -> Sample:
        """The sample at ``position``; its arrays are views of one buffer that belongs to the caller.

        Raises StoreDamaged where the bytes are short or do not hash to what was written.
        """
        entry = self._entries[position]
        view = np.empty(entry.bytes, np.uint8).data
        if damage := read_record(self.root, entry, view):
            raise StoreDamaged(
                expected=f"sample {entry.id!r} whole in {entry.shard} at byte {entry.offset}",
                seen=damage,
                todo=f"Run 'changeover states verify {self.root}' and restore the shard.",
            )
        return layout.decode_record(view, entry, self.manifest)


def read_record(root: Path, entry: Entry, buffer: memoryview) -> str | None:
    """Fill ``buffer`` (entry.bytes long) with a record; returns what is wrong with it, None where it is
    whole.
    """
    try:
        fd = os.open(root / SHARDS_FOLDER / entry.shard, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return "the shard file is missing"
    try:
        count = durable.read_exactly(fd, buffer, entry.offset)
    finally:
        os.close(fd)
    if count < entry.bytes:
        return f"{count} of {entry.bytes} bytes: the shard is truncated"
    actual = xxhash.xxh3_128_hexdigest(buffer)
    if actual != entry.xxh3_128:
        return f"content hashes to {actual}, written as {entry.xxh3_128}"
    return None
