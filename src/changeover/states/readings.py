"""What the last states are, told from the data: ``lm_head`` is applied to them as they are said to be, and in the ways
in which they are usually mistaken.

A drafter learns to predict the target's next token from them. Where the rows are one off, or the final norm is missing
or applied twice, some other reading gives the text's next token more often. No answer needs to be the model's own for
that: on any text the right reading predicts best.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from changeover.machine.errors import InvalidInput
from changeover.states.final_norm import read_final_norm
from changeover.states.probe import load_output_layer
from changeover.states.reader import StatesReader

MAX_SAMPLES = 50
MAX_ROWS = 4_096
MARGIN = 0.02
"""By how much another reading must be better to count: norms hardly change which token is the best of easy rows."""
FEWEST = 0.1
"""A target predicts a tenth of any text that it was made for; below that the states are not of this target."""
AS_SAID = "as said"


@dataclass(frozen=True)
class Readings:
    """``share`` of rows whose next token is the best by each reading, over ``rows`` supervised rows."""

    samples: int
    rows: int
    shares: dict[str, float]
    best: str
    as_said: bool

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.as_said}


def compare_readings(reader: StatesReader, model_path: Path) -> Readings:
    """Look at up to MAX_SAMPLES samples and MAX_ROWS rows, spread evenly.

    Raises InvalidInput where the folder at ``model_path`` has no output layer of the right shape.
    """
    head = load_output_layer(model_path).float()
    manifest = reader.manifest
    if head.shape[1] != manifest.hidden or head.shape[0] < manifest.vocab:
        raise InvalidInput(
            expected=f"an output layer of [{manifest.vocab}, {manifest.hidden}] in {model_path}",
            seen=str(list(head.shape)),
            todo="Give the model that the states were captured from.",
        )
    try:
        norm = read_final_norm(model_path)
    except InvalidInput:
        norm = None  # a family whose norm is not known: the rows can be told, the norm cannot
    states, tokens, samples = _rows(reader)
    readings = {AS_SAID: (states, tokens[1]), "one row earlier": (states, tokens[0])}
    readings["one row later"] = (states, tokens[2])
    if norm is not None:
        readings["before the final norm"] = (norm.apply(states), tokens[1])
        weight = np.where(norm.weight == 0, 1.0, norm.weight)
        readings["normed twice"] = (states / weight, tokens[1])
    shares = {name: _share(head, *pair) for name, pair in readings.items()}
    best = max(shares, key=shares.__getitem__)
    fits = shares[AS_SAID] >= max(FEWEST, shares[best] - MARGIN)
    return Readings(samples, len(states), shares, best, fits)


def _rows(reader: StatesReader) -> tuple[Any, tuple[Any, Any, Any], int]:
    """float32 [N, H] of rows t, and tokens t, t + 1, t + 2, where t + 1 is supervised."""
    count = min(MAX_SAMPLES, len(reader))
    positions = [round(i * (len(reader) - 1) / max(1, count - 1)) for i in range(count)]
    states, tokens = [], []
    for position in positions:
        sample = reader.read(position)
        rows = np.flatnonzero(sample.loss_mask[1:-1])[: MAX_ROWS // count or 1]
        states.append((sample.last[rows].astype(np.uint32) << 16).view(np.float32))
        tokens.append(np.stack([sample.input_ids[rows + step] for step in range(3)]))
    if not sum(map(len, states)):
        raise InvalidInput(
            expected="supervised rows (loss_mask 1)", seen=f"none in {count} samples", todo="Check the data."
        )
    first, second, third = np.concatenate(tokens, axis=1)
    return np.concatenate(states), (first, second, third), count


def _share(head: Any, states: Any, tokens: Any) -> float:
    import torch

    right = 0
    for start in range(0, len(states), 256):
        best = (torch.from_numpy(np.ascontiguousarray(states[start : start + 256])) @ head.T).argmax(-1)
        right += int((best.numpy() == tokens[start : start + 256]).sum())
    return right / len(states)
