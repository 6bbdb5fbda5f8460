"""The draft vocabulary: the few thousand target tokens that the drafter may propose.

A smaller head makes every draft step cheaper; a token outside it can never be drafted. So: the tokens that
the target itself was seen to write, by frequency, with the tokens forced in that every answer needs (eos,
chat markers).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from changeover.machine.errors import InvalidInput

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DraftVocabulary:
    """``token_ids`` int64 [Dv]: sorted target ids, row i of the draft head proposes ``token_ids[i]``."""

    token_ids: npt.NDArray[np.int64]
    target_size: int

    def __post_init__(self) -> None:
        ids = self.token_ids
        if ids.size == 0 or ids[0] < 0 or ids[-1] >= self.target_size or bool(np.any(np.diff(ids) <= 0)):
            raise InvalidInput(
                expected=f"draft token ids, strictly ascending within 0..{self.target_size - 1}",
                seen=f"{ids.size} ids, first {ids[:3].tolist()}, last {ids[-3:].tolist()}",
                todo="The d2t table of this drafter is damaged or belongs to another target.",
            )

    @property
    def size(self) -> int:
        return int(self.token_ids.size)

    @property
    def d2t(self) -> npt.NDArray[np.int64]:
        """Offsets as SGLang and vLLM read them: target id = i + d2t[i]."""
        return self.token_ids - np.arange(self.size, dtype=np.int64)

    @property
    def t2d(self) -> npt.NDArray[np.bool_]:
        """[V], True where the target token can be drafted."""
        mask = np.zeros(self.target_size, dtype=np.bool_)
        mask[self.token_ids] = True
        return mask

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.token_ids.astype("<i8").tobytes()).hexdigest()

    def coverage(self, counts: Counts) -> float:
        """Share of the counted tokens that can be drafted (1.0 when nothing was counted)."""
        total = int(counts.sum())
        return 1.0 if total == 0 else float(int(counts[self.token_ids].sum()) / total)


def vocabulary_from_d2t(d2t: npt.NDArray[np.int64], target_size: int) -> DraftVocabulary:
    return DraftVocabulary(d2t + np.arange(d2t.size, dtype=np.int64), target_size)


def count_supervised(
    samples: Iterable[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]], target_size: int
) -> Counts:
    """int64 [V]: how often each token stands at a supervised row; pairs of input_ids, loss_mask [T]."""
    counts = np.zeros(target_size, dtype=np.int64)
    for input_ids, loss_mask in samples:
        counts += np.bincount(input_ids[loss_mask.astype(np.bool_)], minlength=target_size)
    return counts


def choose_vocabulary(counts: Counts, size: int, forced: Sequence[int]) -> DraftVocabulary:
    """The forced tokens, then the most frequent; ties and unseen tokens by the smaller id.

    In a byte-pair vocabulary small ids are early merges, so the unseen fill is itself ordered by frequency in
    the tokenizer's own training text.
    """
    if not len(set(forced)) <= size <= counts.size:
        raise InvalidInput(
            expected=f"a draft vocabulary of {len(set(forced))} (forced tokens) to {counts.size} tokens",
            seen=str(size),
            todo="Set draft_vocab_size within that range.",
        )
    order = np.lexsort((np.arange(counts.size), -counts))
    is_forced = np.zeros(counts.size, dtype=np.bool_)
    is_forced[list(forced)] = True
    free = order[~is_forced[order]]
    chosen = np.concatenate([np.flatnonzero(is_forced), free[: size - int(is_forced.sum())]])
    return DraftVocabulary(np.sort(chosen).astype(np.int64), int(counts.size))
