"""AngelSlim's offline states: ``rows_0-5000/data_0.ckpt`` (``tools/generate_hidden_for_draft_model.py``).

Keys, each with a batch of one before it: ``input_ids`` and ``loss_mask`` int64 [1, T], ``target_hiddens`` [1, T, H]
after the final norm, ``hidden_states`` [1, T, 3H].
"""

from __future__ import annotations

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

GROUP = 5000


class AngelSlim(NothingBeside):
    name = "angelslim"
    last_norm: Norm | None = "post"

    def path(self, index: int, sample_id: str) -> Path:
        first = index // GROUP * GROUP
        return Path(f"rows_{first}-{first + GROUP}") / f"data_{index}.ckpt"

    def write(self, path: Path, sample: Sample) -> None:
        import torch

        tensors = {
            "input_ids": torch.from_numpy(sample.input_ids.copy())[None],
            "loss_mask": torch.from_numpy(sample.loss_mask.astype(np.int64))[None],
            "target_hiddens": tensor_of(sample.last)[None],
            "hidden_states": tensor_of(sample.aux).reshape(1, sample.tokens, -1),
        }
        save_torch(path, tensors)

    def files(self, folder: Path) -> list[Path]:
        return sorted(folder.glob("rows_*/data_*.ckpt"), key=numbers_in)

    def read(self, path: Path, boundaries: int, hidden: int) -> PeerSample:
        loaded = load_torch(path)
        ids = integers_of(take(loaded, "input_ids"), "input_ids")
        mask = integers_of(take(loaded, "loss_mask"), "loss_mask")
        return PeerSample(
            path.stem,
            ids,
            mask.astype(np.uint8),
            bits_of(take(loaded, "hidden_states"), (len(ids), boundaries, hidden), "hidden_states"),
            bits_of(take(loaded, "target_hiddens"), (len(ids), hidden), "target_hiddens"),
        )
