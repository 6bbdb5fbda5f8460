"""The states of a store, divided into what the drafter learns from and what it is judged by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from changeover.drafter.target import TargetFacts
from changeover.machine.errors import InvalidInput
from changeover.states.prompts import is_held_out
from changeover.states.store import Sample, StatesReader


@dataclass(frozen=True)
class Corpus:
    """Positions in the reader, each in the order of sample ids (so that the order of collection does not
    matter).
    """

    reader: StatesReader
    train: tuple[int, ...]
    held_out: tuple[int, ...]

    @property
    def boundaries(self) -> tuple[int, ...]:
        return tuple(self.reader.manifest.boundaries)

    def train_rows(self) -> list[int]:
        return [self.reader.entry(position).tokens for position in self.train]

    def read(self, positions: tuple[int, ...] | list[int]) -> list[Sample]:
        return [self.reader.read(position) for position in positions]

    def token_pairs(
        self, positions: tuple[int, ...]
    ) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]]:
        """(input_ids, loss_mask) of each sample, without its states kept."""
        samples = (self.reader.read(position) for position in positions)
        return [(sample.input_ids.copy(), sample.loss_mask.copy()) for sample in samples]


def open_corpus(states: Path, target: TargetFacts) -> Corpus:
    """Open a store for training. Raises InvalidInput when it is empty, or was captured from another target.

    The held-out share is the one that the store was collected with (``held_out_fraction`` of its manifest).
    """
    reader = StatesReader(states)
    manifest = reader.manifest
    seen = (manifest.hidden, manifest.layers, manifest.vocab)
    wanted = (target.hidden, target.layers, target.vocab)
    if seen != wanted:
        raise InvalidInput(
            expected=f"states of the target in {target.path} (hidden, layers, vocab {wanted})",
            seen=f"{states} holds {seen}",
            todo="Give the model that the states were captured from.",
        )
    if manifest.last_norm != "post":
        raise InvalidInput(
            expected="last hidden states after the final norm (last_norm: post)",
            seen=f"last_norm: {manifest.last_norm} in {states}",
            todo="Collect again; states before the norm are not read by this version.",
        )
    learnable = sorted(
        (p for p in range(len(reader)) if reader.entry(p).supervised_tokens > 0), key=reader.ids.__getitem__
    )
    held_out = {p for p in learnable if is_held_out(reader.ids[p], manifest.held_out_fraction)}
    train = tuple(p for p in learnable if p not in held_out)
    if not train:
        raise InvalidInput(
            expected=f"samples with generated tokens in {states}",
            seen=f"{len(reader)} samples, {len(learnable)} with such tokens, {len(held_out)} held out",
            todo="Collect more samples.",
        )
    return Corpus(reader, train, tuple(p for p in learnable if p in held_out))
