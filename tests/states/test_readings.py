"""What stored states are, told from real ones: SmolLM2's states of a real text, and the usual mistakes made on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from changeover.machine.errors import InvalidInput
from changeover.states.final_norm import read_final_norm
from changeover.states.readings import AS_SAID, compare_readings
from changeover.states.store import Manifest, Sample, StatesReader, StatesWriter
from changeover.states.tensors import to_bf16_bits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
BOUNDARIES = (2, 15, 27)
TEXTS = [
    "The Apollo programme landed the first people on the Moon in July 1969. Neil Armstrong and Buzz Aldrin walked on "
    "its surface while Michael Collins stayed in orbit around it.",
    "To boil an egg, bring a pot of water to a boil, put the egg into the water with a spoon, wait for seven minutes, "
    "and then put it into cold water so that it does not go on cooking.",
]


@pytest.fixture(scope="module")
def states(model_dir: Path) -> list[Sample]:
    """Of texts, not of answers: what a peer's dataset holds. Prompt rows are the first eight."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    made = []
    for number, text in enumerate(TEXTS):
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            hidden = model(ids, output_hidden_states=True).hidden_states
        aux = np.stack([hidden[boundary][0].numpy() for boundary in BOUNDARIES], axis=1)
        mask = (np.arange(ids.shape[1]) >= 8).astype(np.uint8)
        last = to_bf16_bits(hidden[-1][0].numpy())
        made.append(Sample(f"text-{number}", ids[0].numpy(), mask, to_bf16_bits(aux), last))
    return made


def as_floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def read_so(states: list[Sample], change: Callable[[Sample], Sample], model_dir: Path, folder: Path):
    manifest = Manifest(hidden=576, layers=30, vocab=49152, boundaries=BOUNDARIES)
    with StatesWriter.create(folder, manifest) as writer:
        for sample in states:
            writer.add(change(sample))
    return compare_readings(StatesReader(folder), model_dir)


def test_right_states_are_what_they_are_said_to_be(
    states: list[Sample], model_dir: Path, tmp_path: Path
) -> None:
    found = read_so(states, lambda sample: sample, model_dir, tmp_path / "states")
    assert found.as_said and found.best == AS_SAID and found.rows > 50
    assert found.shares[AS_SAID] > 0.4 > found.shares["one row later"]


def test_a_row_off_a_norm_missing_and_a_norm_too_many_are_named(
    states: list[Sample], model_dir: Path, tmp_path: Path
) -> None:
    norm = read_final_norm(model_dir)
    weight = norm.weight

    def late(sample: Sample) -> Sample:
        return replace(sample, last=np.roll(sample.last, 1, axis=0))

    def unnormed(sample: Sample) -> Sample:
        return replace(sample, last=to_bf16_bits(as_floats(sample.last) / weight))

    def normed_twice(sample: Sample) -> Sample:
        return replace(sample, last=to_bf16_bits(norm.apply(as_floats(sample.last))))

    seen = {
        change.__name__: read_so(states, change, model_dir, tmp_path / change.__name__)
        for change in (late, unnormed, normed_twice)
    }
    assert {name: (found.best, found.as_said) for name, found in seen.items()} == {
        "late": ("one row earlier", False),
        "unnormed": ("before the final norm", False),
        "normed_twice": ("normed twice", False),
    }


def test_states_of_another_model_are_not_believed(
    states: list[Sample], model_dir: Path, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)

    def another(sample: Sample) -> Sample:
        return replace(
            sample, last=to_bf16_bits(random.standard_normal(sample.last.shape).astype(np.float32))
        )

    assert not read_so(states, another, model_dir, tmp_path / "states").as_said


def test_nothing_to_judge_by_is_said(states: list[Sample], model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="supervised rows"):
        read_so(
            states,
            lambda sample: replace(sample, loss_mask=np.zeros_like(sample.loss_mask)),
            model_dir,
            tmp_path / "states",
        )
