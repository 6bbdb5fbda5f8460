"""From another trainer's files to a store: what cannot be read is listed with its reason, and the store says what it
took the states for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from changeover.machine.errors import InvalidInput
from changeover.machine.progress import Progress, ProgressSink, ignore_progress
from changeover.states.final_norm import FinalNorm, read_final_norm
from changeover.states.formats.peer import (
    Norm,
    PeerFileInvalid,
    PeerFormat,
    PeerSample,
    read_provenance,
)
from changeover.states.gate import GateFacts, gate_json, objections
from changeover.states.layout import Sample
from changeover.states.manifest import Manifest
from changeover.states.reader import StatesReader
from changeover.states.readings import Readings, compare_readings
from changeover.states.tensors import to_bf16_bits
from changeover.states.verify import ids_digest
from changeover.states.writer import StatesWriter


@dataclass(frozen=True)
class TakenIn:
    """``failed``: reasons by file. ``sealed`` only where nearly all were read and the states are what they were said to
    be (:mod:`changeover.states.readings`).
    """

    folder: Path
    samples: int
    tokens: int
    failed: Mapping[str, str]
    readings: Readings
    sealed: bool
    objections: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "folder": str(self.folder),
            "failed": dict(self.failed),
            "readings": self.readings.to_json(),
            "objections": list(self.objections),
        }


def take_in(
    folder: Path,
    form: PeerFormat,
    manifest: Manifest,
    out: Path,
    model_path: Path,
    *,
    last_norm: Norm | None = None,
    trim: bool = False,
    on_progress: ProgressSink = ignore_progress,
) -> TakenIn:
    """Read every sample of ``folder`` into a new store at ``out``, or go on with one that was begun.

    ``last_norm`` says whether the files' last states are after the final norm, where the format leaves it open; states
    before it are normed with the target's own weight. ``trim`` drops the rows behind the last supervised one (padding).
    Raises InvalidInput where nothing can be read at all.
    """
    norm = form.last_norm or last_norm
    if norm is None:
        raise InvalidInput(
            expected=f"--last-norm pre or post: files of {form.name} do not say which",
            seen="neither",
            todo="Its Hugging Face dumper writes post, its vLLM dumper pre. `states probe` tells a wrong choice.",
        )
    files = form.files(folder)
    if not files:
        raise InvalidInput(
            expected=f"files of {form.name}, such as {form.path(0, 'sample')}, in {folder}",
            seen="none",
            todo="Give the folder that its collector wrote.",
        )
    final_norm = read_final_norm(model_path) if norm == "pre" else None
    names = read_provenance(folder).get("files", {})
    failed: dict[str, str] = {}
    with StatesWriter.open(out, manifest) as writer:
        for done, path in enumerate(files):
            relative = str(path.relative_to(folder))
            try:
                found = form.read(path, len(manifest.boundaries), manifest.hidden)
                sample = _sample(found, names.get(relative) or _name(found, path, folder), final_norm, trim)
                if sample.id not in writer.committed:
                    writer.add(sample)
            except (PeerFileInvalid, InvalidInput) as error:
                failed[relative] = str(error)
                writer.record_failure(
                    {"id": relative, "kind": "invalid", "reason": str(error), "attempts": 1}
                )
            on_progress(Progress("convert", done + 1, len(files), "samples", {"failed": len(failed)}))
        writer.commit_shard()
        if not writer.committed:
            raise InvalidInput(
                expected=f"samples of {form.name} in {folder}",
                seen=f"{len(failed)} files, none of them one: {next(iter(failed.values()))}",
                todo="Check --from, --boundaries and --model.",
            )
        readings = compare_readings(StatesReader(out), model_path)
        return _seal(writer, failed, readings, out)


def _seal(writer: StatesWriter, failed: Mapping[str, str], readings: Readings, out: Path) -> TakenIn:
    entries = list(writer.committed.values())
    facts = GateFacts(
        requested=[*writer.committed, *failed],
        present=list(writer.committed),
        answered=list(writer.committed),  # a peer keeps no answers beside its states
        failed=failed,
        damages=(),
        staging_files=(),
        open_samples=writer.open_samples,
        probe_passed=readings.as_said,
    )
    tokens = sum(entry.tokens for entry in entries)
    gate = gate_json(
        facts,
        tokens=tokens,
        supervised_tokens=sum(entry.supervised_tokens for entry in entries),
        size_bytes=sum(entry.bytes for entry in entries),
        ids_sha256=ids_digest(writer.committed),
    )
    against = tuple(objections(facts))
    writer.write_end(probe=readings.to_json(), gate=gate, sealed=not against)
    return TakenIn(out, len(entries), tokens, failed, readings, not against, against)


def _name(found: PeerSample, path: Path, folder: Path) -> str:
    """Its own where it has one, else that of its file with the folder before it: ``rows_0-2000/data_7``."""
    if found.name != path.name.partition(".")[0]:
        return found.name
    return str(path.relative_to(folder).with_name(found.name))


def _sample(found: PeerSample, name: str, norm: FinalNorm | None, trim: bool) -> Sample:
    if len(found.loss_mask) != len(found.input_ids):
        raise PeerFileInvalid(f"loss_mask of {len(found.loss_mask)} rows for {len(found.input_ids)} tokens")
    supervised = np.flatnonzero(found.loss_mask)
    rows = int(supervised[-1]) + 1 if trim and len(supervised) else len(found.input_ids)
    last = found.last[:rows]
    if norm is not None:
        last = to_bf16_bits(norm.apply((last.astype(np.uint32) << 16).view(np.float32)))
    return Sample(
        id=name,
        input_ids=found.input_ids[:rows],
        loss_mask=(found.loss_mask[:rows] != 0).astype(np.uint8),
        aux=found.aux[:rows],
        last=last,
    )
