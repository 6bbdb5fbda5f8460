"""The replayed acceptance length equals that of a greedy server, written here as a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from changeover.drafter.data import bf16_tensor
from changeover.drafter.evaluate import bootstrap_interval, frozen_for, summarise
from changeover.drafter.replay import (
    Answer,
    SampleReplay,
    acceptance_length,
    answers,
    last_tokens,
    replay,
    walk,
)
from changeover.states.store import Sample
from tests.drafter.reference import document_hidden
from tests.drafter.samples import as_bf16, make_drafter, make_sample, make_target, make_vocabulary

EOS = 2


def propose(drafter, target, vocabulary, aux: torch.Tensor, known: list[int], drafted: list[int]) -> int:
    """The token that the drafter adds to ``drafted`` after the committed ``known``, by the plain reference."""
    hidden = document_hidden(
        drafter,
        target.embedding,
        aux,
        torch.tensor(known),
        len(drafted) + 1,
        torch.tensor(drafted, dtype=torch.long),
    )
    logits = drafter.lm_head(drafter.norm(hidden[-1][-1]))
    return int(vocabulary.token_ids[int(logits.argmax())])


def serve(sample: Sample, drafter, target, vocabulary, draft_tokens: int, end: int) -> tuple[int, int]:
    """A server's loop over one answer: draft from what is committed, verify, advance. (Verify steps, accepted.)"""
    known = [*sample.input_ids.tolist(), end]
    aux = bf16_tensor(sample.aux).float()
    committed = int(np.flatnonzero(sample.loss_mask)[0]) + 1
    steps = accepted_total = 0
    while committed < len(known):
        left = len(known) - committed
        drafted: list[int] = []
        while len(drafted) < draft_tokens:
            drafted.append(propose(drafter, target, vocabulary, aux, known[:committed], drafted))
        if end != EOS:  # the server knows where max_tokens cuts
            drafted = drafted[: left - 1]
        accepted = 0
        while accepted < min(len(drafted), left - 1) and drafted[accepted] == known[committed + accepted]:
            accepted += 1
        if drafted:
            steps += 1
            accepted_total += accepted
        committed += accepted + 1
    return steps, accepted_total


def answered_sample(drafter, target, vocabulary, *, seed: int, end: int) -> Sample:
    """An answer that the drafter often, but not always, foresees, at its first and its later steps."""
    rng = np.random.default_rng(seed)
    prompt, rows = 5, 24
    sample = make_sample(rows, [0] * prompt + [1] * (rows - prompt), seed=seed)
    aux = bf16_tensor(sample.aux).float()
    ids = sample.input_ids.tolist()
    for at in range(prompt + 1, rows):
        ahead = int(rng.integers(0, 3))
        if rng.random() < 0.8 and at - ahead > prompt:
            ids[at] = propose(drafter, target, vocabulary, aux, ids[: at - ahead], ids[at - ahead : at])
    last = bf16_tensor(sample.last).float()
    last[-1] = target.lm_head[end] / target.lm_head[end].norm() * 50
    return Sample(sample.id, np.array(ids, dtype=np.int64), sample.loss_mask, sample.aux, as_bf16(last))


@pytest.mark.parametrize("end", [EOS, 9])
@pytest.mark.parametrize("draft_tokens", [1, 3])
def test_the_walk_equals_a_server(draft_tokens: int, end: int) -> None:
    target, vocabulary = make_target(), make_vocabulary()
    drafter = make_drafter(target, vocabulary)
    with torch.no_grad():
        samples = [answered_sample(drafter, target, vocabulary, seed=seed, end=end) for seed in range(4)]
        assert last_tokens(samples, target) == [end] * 4
        got = replay(
            drafter, frozen_for(target, vocabulary), target, vocabulary, samples, draft_tokens, (EOS,)
        )
        served = [serve(sample, drafter, target, vocabulary, draft_tokens, end) for sample in samples]
    assert [(one.verify_steps, one.accepted) for one in got] == served
    assert sum(one.accepted for one in got) > 5, "a test without acceptance shows nothing"
    assert [one.generated for one in got] == [20] * 4


def test_answers_are_the_generated_runs() -> None:
    known = np.array([5, 6, 7, 8, EOS, 5, 5, 8, 9])
    mask = np.array([0, 0, 1, 1, 1, 0, 0, 1], dtype=np.uint8)
    assert answers(mask, known, (EOS,)) == [Answer(2, 4, True), Answer(7, 8, False)]
    assert answers(np.array([1, 1, 0], dtype=np.uint8), np.array([1, 1, 1, 1]), (EOS,)) == []


@given(
    generated=st.integers(1, 40),
    depths=st.lists(st.integers(0, 5), min_size=50, max_size=50),
    draft_tokens=st.integers(1, 5),
    stopped=st.booleans(),
)
def test_a_walk_generates_every_token_once(
    generated: int, depths: list[int], draft_tokens: int, stopped: bool
) -> None:
    span = Answer(4, 3 + generated, stopped)
    found = walk("a", [span], np.array(depths), draft_tokens)
    uncounted = 0 if stopped else 1  # the step that had nothing to draft
    assert found.generated == generated
    assert found.generated - 1 - uncounted <= found.verify_steps + found.accepted <= found.generated - 1
    assert all(a <= r <= found.verify_steps for a, r in zip(found.accepted_at, found.reached, strict=True))
    assert sum(found.accepted_at) == found.accepted


def test_nothing_accepted_is_length_one_and_everything_is_k_plus_one() -> None:
    span = [Answer(1, 41, True)]
    nothing = walk("a", span, np.zeros(50, dtype=np.int64), 3)
    everything = walk("a", span, np.full(50, 3), 3)
    assert acceptance_length([nothing]) == 1.0
    assert (everything.verify_steps, everything.accepted) == (10, 30)
    assert acceptance_length([everything]) == 4.0


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 100)), min_size=2, max_size=30))
def test_the_interval_holds_the_estimate_and_is_reproducible(counts: list[tuple[int, int]]) -> None:
    replays = [SampleReplay(str(i), s + a, s, a, (s,), (a,)) for i, (s, a) in enumerate(counts)]
    low, high = bootstrap_interval(replays, seed=0) or (0.0, 0.0)
    ratios = [1 + a / s for s, a in counts]
    assert min(ratios) - 1e-9 <= low <= high <= max(ratios) + 1e-9
    assert bootstrap_interval(replays, seed=0) == (low, high)
    assert bootstrap_interval(replays[:1], seed=0) is None


def test_a_step_that_nothing_reached_has_no_rate() -> None:
    summary = summarise([SampleReplay("a", 5, 4, 0, (4, 0), (0, 0))], draft_tokens=2)
    assert summary["step_acceptance"] == [0.0, None] and summary["acceptance_length"] == 1.0
