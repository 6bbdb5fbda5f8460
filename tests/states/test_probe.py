"""The probe: right states pass, shifted or differently normed ones do not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from changeover.machine.errors import InvalidInput
from changeover.states.layout import Sample
from changeover.states.probe import judge, load_output_layer, probe
from changeover.states.store import StatesReader, StatesWriter
from tests.states.fake_server import HIDDEN, VOCAB, bf16, output_vectors, write_model
from tests.states.samples import make_sample, small_manifest


def stored(
    root: Path, *, wrong_rows: int = 0, shift: int = 0, samples: int = 4, last_norm: str = "post"
) -> StatesReader:
    with StatesWriter.create(root, small_manifest(vocab=VOCAB, last_norm=last_norm)) as writer:
        for i in range(samples):
            made = make_sample(f"s{i}", tokens=105, prompt_tokens=5)
            following = np.append(made.input_ids[1:], 0)
            following[10 : 10 + wrong_rows] = (following[10 : 10 + wrong_rows] + 1) % VOCAB
            last = np.roll(bf16(output_vectors()[following]), shift, axis=0)
            writer.add(Sample(made.id, made.input_ids, made.loss_mask, made.aux, last))
    return StatesReader(root)


def test_right_states_pass(tmp_path: Path) -> None:
    result = probe(stored(tmp_path / "s"), write_model(tmp_path / "model"))
    assert (result.samples, result.rows, result.agreed, result.passed) == (4, 400, 400, True)


@pytest.mark.parametrize("shift", [-1, 1])
def test_torchspec_87_states_of_the_row_beside_do_not_pass(tmp_path: Path, shift: int) -> None:
    result = probe(stored(tmp_path / "s", shift=shift), write_model(tmp_path / "model"))
    assert not result.passed and result.agreement < 0.2


@pytest.mark.parametrize(("wrong_rows", "passed"), [(0, True), (1, False), (2, False)])
def test_the_limit_is_above_99_in_100(tmp_path: Path, wrong_rows: int, passed: bool) -> None:
    result = probe(stored(tmp_path / "s", wrong_rows=wrong_rows), write_model(tmp_path / "model"))
    assert result.passed is passed
    assert result.agreement == pytest.approx(1 - wrong_rows / 100)


@pytest.mark.parametrize(("ahead", "counted"), [(1.008, True), (1.05, False)])
def test_a_near_tie_of_bfloat16_counts_and_is_said_apart(tmp_path: Path, ahead: float, counted: bool) -> None:
    """A server that rounds to bfloat16 takes either of two tokens this close; the next one it would never take."""
    root, model = tmp_path / "s", write_model(tmp_path / "model")
    head = np.eye(VOCAB, HIDDEN, dtype=np.float32)
    save_file({"lm_head.weight": head}, model / "model.safetensors")
    with StatesWriter.create(root, small_manifest(vocab=VOCAB)) as writer:
        made = make_sample("s", tokens=30, prompt_tokens=20)
        ids = made.input_ids % HIDDEN
        following = np.append(ids[1:], 0)
        last = bf16(head[following] + ahead * head[(following + 1) % HIDDEN])
        writer.add(Sample("s", ids, made.loss_mask, made.aux, last))
    result = probe(StatesReader(root), model)
    assert (result.rows, result.exact, result.agreed) == (10, 0, 10 if counted else 0)


def test_the_prompt_is_not_judged(tmp_path: Path) -> None:
    """Its tokens were given, not chosen by the model."""
    root = tmp_path / "s"
    with StatesWriter.create(root, small_manifest(vocab=VOCAB)) as writer:
        made = make_sample("s", tokens=30, prompt_tokens=20)
        last = bf16(output_vectors()[np.append(made.input_ids[1:], 0)])
        last[:19] = bf16(np.ones((19, HIDDEN)))
        writer.add(Sample("s", made.input_ids, made.loss_mask, made.aux, last))
    result = probe(StatesReader(root), write_model(tmp_path / "model"))
    assert (result.rows, result.passed) == (10, True)


def test_at_most_fifty_samples_are_read(tmp_path: Path) -> None:
    result = probe(stored(tmp_path / "s", samples=53), write_model(tmp_path / "model"))
    assert result.samples == 50


def test_speculators_313_states_before_the_norm_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="pre-norm"):
        probe(stored(tmp_path / "s", last_norm="pre"), write_model(tmp_path / "model"))


def test_another_models_head_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    save_file({"lm_head.weight": np.zeros((VOCAB, HIDDEN + 1), np.float32)}, model / "model.safetensors")
    with pytest.raises(InvalidInput, match="output layer"):
        probe(stored(tmp_path / "s"), model)


def test_tied_and_nested_and_sharded_models_are_read(tmp_path: Path) -> None:
    weights = output_vectors()
    tied = tmp_path / "tied"
    tied.mkdir()
    (tied / "config.json").write_text(json.dumps({"text_config": {"tie_word_embeddings": True}}))
    save_file({"model.embed_tokens.weight": weights}, tied / "model-1.safetensors")
    index = {"weight_map": {"model.embed_tokens.weight": "model-1.safetensors"}}
    (tied / "model.safetensors.index.json").write_text(json.dumps(index))
    np.testing.assert_array_equal(load_output_layer(tied).numpy(), weights)
    (tied / "config.json").write_text(json.dumps({"text_config": {}}))
    with pytest.raises(InvalidInput, match="lm_head"):
        load_output_layer(tied)


def test_no_rows_do_not_pass() -> None:
    assert not judge([("s", 0, 0, 0)]).passed
    assert judge([("a", 200, 200, 200), ("b", 100, 99, 99)]).worst_sample == "b"
