"""NVIDIA Model-Optimizer's offline states: ``<conversation_id>.pt`` (``examples/speculative_decoding``).

Keys: ``input_ids`` int64 [T], ``hidden_states`` [T, H], ``aux_hidden_states`` [T, 3H], ``loss_mask`` [T] where the
dumper made one, ``conversation_id``. Its Hugging Face dumper writes ``hidden_states`` after the final norm, its vLLM
dumper before it, and the file says neither.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from changeover.states.formats.peer import (
    Norm,
    NothingBeside,
    PeerFileInvalid,
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


class ModelOptimizer(NothingBeside):
    name = "model-optimizer"
    last_norm: Norm | None = None

    def path(self, index: int, sample_id: str) -> Path:
        return Path(f"{index:08d}-{re.sub(r'[^A-Za-z0-9._-]', '_', sample_id)[:100]}.pt")

    def write(self, path: Path, sample: Sample) -> None:
        import torch

        tensors = {
            "input_ids": torch.from_numpy(sample.input_ids.copy()),
            "loss_mask": torch.from_numpy(sample.loss_mask.astype(np.int64)),
            "hidden_states": tensor_of(sample.last),
            "aux_hidden_states": tensor_of(sample.aux).reshape(sample.tokens, -1),
            "conversation_id": sample.id,
        }
        save_torch(path, tensors)

    def files(self, folder: Path) -> list[Path]:
        return sorted(folder.glob("*.pt"), key=lambda path: (numbers_in(path), path.name))

    def read(self, path: Path, boundaries: int, hidden: int) -> PeerSample:
        loaded = load_torch(path)
        ids = integers_of(take(loaded, "input_ids"), "input_ids")
        if "loss_mask" not in loaded:
            raise PeerFileInvalid(
                "no loss_mask: dump it with --answer-only-loss, or the prompt would be learned"
            )
        return PeerSample(
            str(loaded.get("conversation_id", path.stem)),
            ids,
            integers_of(loaded["loss_mask"], "loss_mask").astype(np.uint8),
            bits_of(take(loaded, "aux_hidden_states"), (len(ids), boundaries, hidden), "aux_hidden_states"),
            bits_of(take(loaded, "hidden_states"), (len(ids), hidden), "hidden_states"),
        )
