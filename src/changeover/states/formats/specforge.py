"""SpecForge's offline states: ``rows_0-2000/data_0.ckpt`` or ``.ckpt.gz`` (``scripts/prepare_hidden_states.py``, 0.2).

Keys: ``input_ids`` int64 [T], ``loss_mask`` int64 [T], ``hidden_state`` [1, T, H] after the final norm,
``aux_hidden_state`` [1, T, 3H], low, middle, high. Its own files may hold rows of padding: their loss mask is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from changeover.states.formats.peer import (
    Norm,
    NothingBeside,
    PeerSample,
    bits_of,
    integers_of,
    load_torch,
    numbers_in,
    save_torch,
    take,
    tensor_of,
)
from changeover.states.layout import Sample

GROUP = 2000
COMPRESSION_LEVEL = 6  # its own default


@dataclass(frozen=True)
class SpecForge(NothingBeside):
    """``compressed``: ``.ckpt.gz``."""

    compressed: bool = False
    name = "specforge"
    last_norm: Norm | None = "post"

    def path(self, index: int, sample_id: str) -> Path:
        first = index // GROUP * GROUP
        return Path(f"rows_{first}-{first + GROUP}") / f"data_{index}.ckpt{'.gz' if self.compressed else ''}"

    def write(self, path: Path, sample: Sample) -> None:
        import torch

        tensors = {
            "input_ids": torch.from_numpy(sample.input_ids.copy()),
            "loss_mask": torch.from_numpy(sample.loss_mask.astype(np.int64)),
            "hidden_state": tensor_of(sample.last)[None],
            "aux_hidden_state": tensor_of(sample.aux).reshape(1, sample.tokens, -1),
        }
        save_torch(path, tensors, level=COMPRESSION_LEVEL if self.compressed else 0)

    def files(self, folder: Path) -> list[Path]:
        return sorted(
            (*folder.glob("rows_*/data_*.ckpt"), *folder.glob("rows_*/data_*.ckpt.gz")), key=numbers_in
        )

    def read(self, path: Path, boundaries: int, hidden: int) -> PeerSample:
        loaded = load_torch(path)
        ids = integers_of(take(loaded, "input_ids"), "input_ids")
        mask = integers_of(take(loaded, "loss_mask"), "loss_mask")
        return PeerSample(
            path.name.partition(".")[0],
            ids,
            mask.astype(np.uint8),
            bits_of(take(loaded, "aux_hidden_state"), (len(ids), boundaries, hidden), "aux_hidden_state"),
            bits_of(take(loaded, "hidden_state"), (len(ids), hidden), "hidden_state"),
        )
