"""Writing a states folder so that a crash at any point leaves every committed sample whole.

A shard is written under a temporary name in its own folder; the commit is: header, fsync, rename, fsync of
the folder, answers appended and synced before, index lines appended and synced after. A sample counts when
its index line stands. The shard's header repeats the index lines, so a crash between the rename and the
append loses nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import xxhash

from changeover.machine import durable
from changeover.machine.errors import InvalidInput
from changeover.states import layout, lines
from changeover.states.errors import StoreBusy, StoreDamaged, StoreFull
from changeover.states.layout import Entry, Sample
from changeover.states.manifest import MANIFEST_NAME, Manifest, read_manifest

INDEX_NAME = "index.jsonl"
ANSWERS_NAME = "answers.jsonl"
FAILURES_NAME = "failures.jsonl"
LOCK_NAME = "lock"
SHARDS_FOLDER = "shards"
DEFAULT_SHARD_BYTES = 64 * 1024 * 1024


class StatesWriter:
    """The one writer of a states folder (held by flock); make it with ``create``, ``resume`` or ``open``.

    ``add`` puts a sample into the open shard; ``commit_shard`` makes all of them durable and visible. Leaving
    the ``with`` block commits what is complete.
    """

    def __init__(self, root: Path, manifest: Manifest, lock_fd: int, shard_bytes: int) -> None:
        self.root = root
        self.manifest = manifest
        self._lock_fd = lock_fd
        self._shard_bytes = shard_bytes
        self._entries: dict[str, Entry] = {}
        self._open_entries: list[Entry] = []
        self._open_answers: list[bytes] = []
        self._open_fd: int | None = None
        self._open_end = 0
        self._open_header = 0
        self._next_shard = 0

    # -- opening ---------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, root: Path, manifest: Manifest, *, shard_bytes: int = DEFAULT_SHARD_BYTES) -> Self:
        """A new, empty folder. Raises InvalidInput where one exists, StoreBusy where another writer is at
        work.
        """
        root.mkdir(parents=True, exist_ok=True)
        lock_fd = _lock(root)
        if (root / MANIFEST_NAME).exists():
            os.close(lock_fd)
            raise InvalidInput(
                expected=f"no states folder at {root}",
                seen=f"its {MANIFEST_NAME}",
                todo="Resume it, or name another.",
            )
        (root / SHARDS_FOLDER).mkdir(exist_ok=True)
        durable.replace_json(root / MANIFEST_NAME, manifest.to_json())
        durable.sync_folder(root.parent)
        return cls(root, manifest, lock_fd, shard_bytes)

    @classmethod
    def resume(cls, root: Path, *, shard_bytes: int = DEFAULT_SHARD_BYTES) -> Self:
        """Go on in an existing folder with every sample that was committed.

        Temporary files and a torn last line of a crash are removed. Raises StoreDamaged where a committed
        line or a shard's size is not what was written, and StoreBusy where another writer is at work.
        """
        manifest = read_manifest(root)
        lock_fd = _lock(root)
        writer = cls(root, manifest, lock_fd, shard_bytes)
        try:
            writer._take_up()
        except BaseException:
            os.close(lock_fd)
            raise
        return writer

    @classmethod
    def open(cls, root: Path, manifest: Manifest, *, shard_bytes: int = DEFAULT_SHARD_BYTES) -> Self:
        """``resume`` where the folder exists and holds the same kind of states, else ``create``."""
        if not (root / MANIFEST_NAME).exists():
            return cls.create(root, manifest, shard_bytes=shard_bytes)
        writer = cls.resume(root, shard_bytes=shard_bytes)
        if different := writer.manifest.differences(manifest):
            writer.close()
            raise InvalidInput(
                expected=f"states at {root} of the same model, engine and layout",
                seen="; ".join(different),
                todo="Collect into another folder.",
            )
        return writer

    # -- adding ----------------------------------------------------------------------------------------------

    @property
    def committed(self) -> Mapping[str, Entry]:
        """Samples that are durable, by id, in the order of the index."""
        return self._entries

    @property
    def open_samples(self) -> int:
        """Samples that a crash would lose now."""
        return len(self._open_entries)

    def add(self, sample: Sample, answer: Mapping[str, Any] | None = None) -> Entry:
        """Write one sample; commits the shard first where it is full. ``answer`` becomes a line of
        answers.jsonl.

        Raises InvalidInput (shape, NaN/Inf, id known already), StoreFull (ENOSPC: the record is taken back,
        what was complete before stays and can be committed).
        """
        layout.check_sample(sample, self.manifest)
        if sample.id in self._entries or any(entry.id == sample.id for entry in self._open_entries):
            raise InvalidInput(
                expected="one sample an id",
                seen=f"a second {sample.id!r}",
                todo="Ask only for what is missing.",
            )
        buffers, planes = layout.encode_record(sample, self.manifest.codec)
        entry = self._describe(sample, buffers, planes)
        cost = layout.header_cost(entry, self.manifest)
        if self._open_entries and (
            self._open_end + entry.bytes > self._shard_bytes or layout.header_is_full(self._open_header, cost)
        ):
            self.commit_shard()
        with self._out_of_space(entry.bytes):
            fd = self._open_shard()
            entry = replace(entry, shard=shard_name(self._next_shard), offset=self._open_end)
            durable.write_all(fd, buffers, self._open_end)
        self._open_end += entry.bytes
        self._open_header += cost
        self._open_entries.append(entry)
        if answer is not None:
            self._open_answers.append(lines.encode_line(answer))
        return entry

    def commit_shard(self) -> None:
        """Make the open shard durable and its samples visible; nothing to do where it has none."""
        fd = self._open_fd
        if fd is None or not self._open_entries:
            return
        name = shard_name(self._next_shard)
        temporary = self._temporary(name)
        with self._out_of_space(0):
            durable.write_all(fd, [layout.build_header(self._open_entries, self.manifest)], 0)
            os.fsync(fd)
            if self._open_answers:
                durable.append_lines(self.root / ANSWERS_NAME, self._open_answers)
                self._open_answers = []
        os.close(fd)
        self._open_fd = None
        temporary.replace(self.root / SHARDS_FOLDER / name)
        durable.sync_folder(self.root / SHARDS_FOLDER)
        entries, self._open_entries = self._open_entries, []
        self._next_shard += 1
        with self._out_of_space(0):
            durable.append_lines(
                self.root / INDEX_NAME, [lines.encode_line(entry.to_json()) for entry in entries]
            )
        self._entries |= {entry.id: entry for entry in entries}

    def record_failure(self, failure: Mapping[str, Any]) -> None:
        """One line of failures.jsonl: a sample that could not be had, with its reason."""
        with self._out_of_space(0):
            durable.append_lines(self.root / FAILURES_NAME, [lines.encode_line(failure)])

    def write_end(self, *, probe: Mapping[str, Any], gate: Mapping[str, Any], sealed: bool) -> None:
        """Put the verdicts of the probe and the gate into the manifest."""
        self.manifest = self.manifest.with_end(probe=probe, gate=gate, sealed=sealed)
        durable.replace_json(self.root / MANIFEST_NAME, self.manifest.to_json())

    def seal(self, gate: Mapping[str, Any]) -> None:
        """Commit what is open and declare the folder complete."""
        self.commit_shard()
        self.write_end(probe=self.manifest.probe, gate=gate, sealed=True)

    def close(self) -> None:
        """Commit what is complete and give the folder free."""
        try:
            self.commit_shard()
        finally:
            self._drop_open_shard()
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _describe(self, sample: Sample, buffers: list[memoryview], planes: tuple[int, ...]) -> Entry:
        digest = xxhash.xxh3_128()
        for buffer in buffers:
            digest.update(buffer)
        supervised = np.flatnonzero(sample.loss_mask)
        return Entry(
            id=sample.id,
            shard=shard_name(self._next_shard),
            offset=self._open_end or layout.HEADER_BYTES,
            bytes=sum(buffer.nbytes for buffer in buffers),
            tokens=sample.tokens,
            prompt_tokens=int(supervised[0]) if len(supervised) else sample.tokens,
            supervised_tokens=len(supervised),
            codec=self.manifest.codec,
            planes=planes,
            xxh3_128=digest.hexdigest(),
            ids_sha256=layout.hash_ids(sample.input_ids),
            finite=True,
        )

    def _temporary(self, name: str) -> Path:
        return self.root / SHARDS_FOLDER / f".{name}.partial"

    def _open_shard(self) -> int:
        if self._open_fd is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            fd = os.open(self._temporary(shard_name(self._next_shard)), flags, 0o644)
            self._open_fd = fd
            self._open_end = 0
            self._open_header = 0
            # The header's blocks are taken now, so that a full disk cannot keep complete samples from a
            # commit.
            durable.write_all(fd, [bytes(layout.HEADER_BYTES)], 0)
            self._open_end = layout.HEADER_BYTES
        return self._open_fd

    def _drop_open_shard(self) -> None:
        if self._open_fd is not None:
            os.close(self._open_fd)
            self._open_fd = None
            self._temporary(shard_name(self._next_shard)).unlink(missing_ok=True)
            self._open_entries = []
            self._open_answers = []

    @contextmanager
    def _out_of_space(self, needed_bytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if self._open_fd is not None:
                if self._open_entries:
                    os.ftruncate(self._open_fd, self._open_end)
                else:
                    self._drop_open_shard()
            raise StoreFull(
                expected=f"room for {needed_bytes or 'the commit of'} bytes at {self.root}",
                seen=f"{os.strerror(error.errno)}; {len(self._entries)} samples are committed",
                todo="Free space and resume: what is committed is not asked for again.",
            ) from error

    def _take_up(self) -> None:
        shards = self.root / SHARDS_FOLDER
        shards.mkdir(exist_ok=True)
        for leftover in [*shards.glob(".*.partial"), *self.root.glob(".*.partial")]:
            leftover.unlink()
        for name in (INDEX_NAME, ANSWERS_NAME, FAILURES_NAME):
            lines.cut_torn_tail(self.root / name)
        self._entries = read_index(self.root)
        last_indexed = max((shard_number(entry.shard) for entry in self._entries.values()), default=0)
        present = sorted(shard_number(path.name) for path in shards.glob("shard-*.safetensors"))
        self._recover([shard_name(number) for number in present if number >= last_indexed])
        for name, size in expected_sizes(self._entries.values()).items():
            path = shards / name
            actual = path.stat().st_size if path.exists() else None
            if actual != size:
                raise StoreDamaged(
                    expected=f"{name} with {size} bytes",
                    seen="no such file" if actual is None else f"{actual} bytes",
                    todo=f"Run 'changeover states verify {self.root}' and restore the shard.",
                )
        if present:
            self._next_shard = present[-1] + 1

    def _recover(self, names: list[str]) -> None:
        """Append the index lines of samples whose shard was renamed before a crash, but not yet indexed."""
        found: list[Entry] = []
        for name in names:
            with (self.root / SHARDS_FOLDER / name).open("rb") as file:
                try:
                    listed = layout.entries_in_header(file.read(layout.HEADER_BYTES))
                except (ValueError, KeyError, TypeError) as error:
                    raise StoreDamaged(
                        expected=f"the header of {name}",
                        seen=str(error),
                        todo=f"Run 'changeover states verify {self.root}'.",
                    ) from error
            found += [entry for entry in listed if entry.id not in self._entries]
        if found:
            durable.append_lines(
                self.root / INDEX_NAME, [lines.encode_line(entry.to_json()) for entry in found]
            )
            self._entries |= {entry.id: entry for entry in found}


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def shard_number(name: str) -> int:
    return int(name.removeprefix("shard-").removesuffix(".safetensors"))


def read_index(root: Path) -> dict[str, Entry]:
    """The committed samples by id; a torn last line (a writer at work, or a crash) is not one of them.

    Raises StoreDamaged for any other line that is not whole.
    """
    entries: dict[str, Entry] = {}
    for line in lines.read_lines(root / INDEX_NAME):
        if line.torn:
            break
        if line.value is None:
            raise StoreDamaged(
                expected=f"whole lines in {root / INDEX_NAME}",
                seen=f"line {line.number} (byte {line.offset}): {line.damage}",
                todo=f"Run 'changeover states verify {root}'; the shards' headers repeat every line.",
            )
        entry = Entry.from_json(line.value)
        entries[entry.id] = entry
    return entries


def expected_sizes(entries: Iterable[Entry]) -> dict[str, int]:
    """Bytes of each shard file, by name: a shard ends with its last record."""
    sizes: dict[str, int] = {}
    for entry in entries:
        sizes[entry.shard] = max(sizes.get(entry.shard, 0), entry.offset + entry.bytes)
    return sizes


def _lock(root: Path) -> int:
    fd = os.open(root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise StoreBusy(
            expected=f"no other writer on {root}",
            seen=f"its lock is held (by pid {holder or 'unknown'})",
            todo="Wait for that collection, or stop it.",
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
