"""The draft vocabulary: what is in it, how it is written, what it covers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from changeover.drafter.target import forced_token_ids, read_target_facts
from changeover.drafter.vocabulary import (
    DraftVocabulary,
    choose_vocabulary,
    count_supervised,
    vocabulary_from_d2t,
)
from changeover.machine.errors import InvalidInput
from tests.drafter.samples import make_target, write_target_folder


@given(
    counts=st.lists(st.integers(0, 9), min_size=8, max_size=60),
    forced=st.sets(st.integers(0, 7), max_size=4),
    size=st.integers(4, 8),
)
def test_forced_first_then_by_frequency(counts: list[int], forced: set[int], size: int) -> None:
    array = np.array(counts)
    vocabulary = choose_vocabulary(array, size, sorted(forced))
    ids = vocabulary.token_ids
    assert ids.size == size and list(ids) == sorted(set(ids.tolist())) and forced <= set(ids.tolist())
    free_in = [counts[i] for i in ids if i not in forced]
    free_out = [c for i, c in enumerate(counts) if i not in set(ids.tolist())]
    assert not free_in or not free_out or min(free_in) >= max(free_out)
    assert 0.0 <= vocabulary.coverage(array) <= 1.0


@given(st.sets(st.integers(0, 99), min_size=1))
def test_d2t_are_offsets_and_come_back(ids: set[int]) -> None:
    vocabulary = DraftVocabulary(np.array(sorted(ids)), 100)
    assert [i + offset for i, offset in enumerate(vocabulary.d2t)] == sorted(ids)
    assert np.flatnonzero(vocabulary.t2d).tolist() == sorted(ids)
    again = vocabulary_from_d2t(vocabulary.d2t, 100)
    assert again.sha256 == vocabulary.sha256


def test_only_supervised_tokens_are_counted() -> None:
    counts = count_supervised([(np.array([1, 2, 2, 3]), np.array([0, 1, 1, 0], dtype=np.uint8))], 5)
    assert counts.tolist() == [0, 0, 2, 0, 0]


def test_d2t_of_target_ids_instead_of_offsets_is_refused() -> None:
    with pytest.raises(InvalidInput, match="strictly ascending"):
        vocabulary_from_d2t(np.array([10, 50, 99]), 100)


def test_a_size_below_the_forced_tokens_is_refused() -> None:
    with pytest.raises(InvalidInput, match="draft_vocab_size"):
        choose_vocabulary(np.ones(10), 2, [1, 2, 3])


def test_chat_markers_are_forced_and_other_specials_are_not(tmp_path: Path) -> None:
    model = write_target_folder(tmp_path, make_target())
    (model / "chat_template.jinja").write_text("{{ '<|im_start|>' + role }} <|im_end|>")
    added = [
        {"id": 3, "content": "<|im_start|>", "special": True},
        {"id": 4, "content": "<|im_end|>", "special": True},
        {"id": 5, "content": "<repo>", "special": True},
    ]
    (model / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert forced_token_ids(model, read_target_facts(model)) == (1, 2, 3, 4)
