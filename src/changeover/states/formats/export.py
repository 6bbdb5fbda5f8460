"""From a store to another trainer's files: each whole when it has its name, and what is in it said beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from changeover.machine import durable
from changeover.machine.errors import InvalidInput
from changeover.machine.progress import Progress, ProgressSink, ignore_progress
from changeover.states.final_norm import FinalNorm
from changeover.states.formats.peer import PROVENANCE, PeerFormat, TokenRow, read_provenance, write_whole
from changeover.states.layout import Sample
from changeover.states.prompts import is_held_out
from changeover.states.reader import StatesReader
from changeover.states.tensors import to_bf16_bits

COMMIT_EVERY = 100


@dataclass(frozen=True)
class Exported:
    """``samples`` stand in ``folder``, ``skipped`` of them from an earlier attempt; ``left_out`` were held out."""

    folder: Path
    samples: int
    skipped: int
    left_out: int
    bytes: int

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "folder": str(self.folder)}


def export(
    reader: StatesReader,
    form: PeerFormat,
    out: Path,
    *,
    with_held_out: bool = False,
    final_norm: FinalNorm | None = None,
    on_progress: ProgressSink = ignore_progress,
) -> Exported:
    """Write the samples that a drafter may be trained on, in the order of their ids; an attempt that was cut off is
    gone on with.

    ``with_held_out``: all samples. ``final_norm``, the target's: where the format keeps last states before it and the
    store has them after it, they are divided by its weight. That is not what stood before the norm, which cannot be
    had back, but the norm makes the same of it, but for one more rounding to bfloat16.

    Raises InvalidInput for a folder that holds something else, StoreDamaged where a sample does not hash to what was
    written.
    """
    undo = final_norm if (form.last_norm, reader.manifest.last_norm) == ("pre", "post") else None
    if undo is None and form.last_norm not in (None, reader.manifest.last_norm):
        raise InvalidInput(
            expected=f"last states {form.last_norm}-norm, as {form.name} keeps them",
            seen=f"{reader.manifest.last_norm}-norm in {reader.root}",
            todo="Give the target (--model): its norm's weight is divided out.",
        )
    share = reader.manifest.held_out_fraction
    chosen = sorted(one for one in reader.ids if with_held_out or not is_held_out(one, share))
    about = _provenance(reader, form, with_held_out)
    earlier = read_provenance(out)
    if out.exists() and any(out.iterdir()) and {key: earlier.get(key) for key in about} != about:
        raise InvalidInput(
            expected=f"an empty folder, or this export begun, at {out}",
            seen="other files" if not earlier else "an export of other states, or in another form",
            todo="Name another folder.",
        )
    out.mkdir(parents=True, exist_ok=True)
    names = {sample_id: str(form.path(index, sample_id)) for index, sample_id in enumerate(chosen)}
    durable.replace_json(out / PROVENANCE, {**about, "files": {path: one for one, path in names.items()}})
    skipped = size = 0
    rows = []
    for done, sample_id in enumerate(chosen):
        path = out / names[sample_id]
        sample = _before(undo, reader.read(reader.position(sample_id)))
        rows.append(TokenRow(sample.input_ids.copy(), sample.loss_mask.copy()))
        if path.exists():
            skipped += 1
        else:
            write_whole(path, lambda temporary, sample=sample: form.write(temporary, sample))  # type: ignore[misc]
        size += path.stat().st_size
        on_progress(Progress("export", done + 1, len(chosen), "samples", {"bytes": size}))
    form.finish(out, rows)
    for folder in {path.parent for path in map(out.joinpath, names.values())} | {out}:
        durable.sync_folder(folder)
    return Exported(out, len(chosen), skipped, len(reader) - len(chosen), size)


def _before(norm: FinalNorm | None, sample: Sample) -> Sample:
    if norm is None:
        return sample
    weight = np.where(norm.weight == 0, 1, norm.weight).astype(np.float32)
    states = (sample.last.astype(np.uint32) << 16).view(np.float32)
    return replace(sample, last=to_bf16_bits((states / weight).astype(np.float32)))


def _provenance(reader: StatesReader, form: PeerFormat, with_held_out: bool) -> dict[str, Any]:
    manifest = reader.manifest
    return {
        "format": form.name,
        "boundaries": list(manifest.boundaries),
        "last_norm": manifest.last_norm,
        "hidden": manifest.hidden,
        "layers": manifest.layers,
        "vocab": manifest.vocab,
        "model": {"name": manifest.model_name, "sha256": manifest.model_sha256},
        "engine": {"kind": manifest.engine_kind, "version": manifest.engine_version},
        "held_out_fraction": manifest.held_out_fraction,
        "with_held_out": with_held_out,
    }
