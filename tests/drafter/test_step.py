"""The packed, chunked, supervised-rows-only step equals the plain one: loss and every gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from changeover.drafter.attention import merge_diagonals
from changeover.drafter.data import chain_slots, pack
from changeover.drafter.step import Frozen, ttt_hidden, ttt_loss
from tests.drafter.reference import document_hidden, reference_loss
from tests.drafter.samples import make_drafter, make_sample, make_target, make_vocabulary

TWO_TURNS = [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1]


def both_losses(samples, steps, chunk_targets):
    target, vocabulary = make_target(), make_vocabulary()
    drafter = make_drafter(target, vocabulary)
    head = target.lm_head[torch.from_numpy(vocabulary.token_ids)]
    batch = pack(samples, steps=steps, dtype=torch.float32, device="cpu")
    fast = ttt_loss(
        drafter, Frozen(target.embedding, head), batch, step_decay=0.8, chunk_targets=chunk_targets
    )
    fast.loss.backward()
    fast_grads = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad(set_to_none=True)
    plain = reference_loss(drafter, target.embedding, head, samples, steps, 0.8)
    plain.backward()
    return fast.loss, plain, fast_grads, {name: p.grad for name, p in drafter.named_parameters()}


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("chunk_targets", [1, 7, 1000])
def test_loss_and_gradients_equal_the_plain_reference(steps: int, chunk_targets: int) -> None:
    samples = [
        make_sample(13, seed=1),
        make_sample(3, [0, 0, 1], seed=2),
        make_sample(12, TWO_TURNS, seed=3),
        make_sample(20, seed=4),
    ]
    loss, plain, grads, plain_grads = both_losses(samples, steps, chunk_targets)
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-6)
    assert grads.keys() == plain_grads.keys()
    for name, grad in grads.items():
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(
            grad, plain_grads[name], rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@settings(max_examples=25, deadline=None)
@given(
    masks=st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=14), min_size=1, max_size=4).filter(
        lambda masks: any(any(mask[1:]) for mask in masks)
    ),
    steps=st.integers(1, 4),
)
def test_any_loss_mask_gives_the_reference_loss(masks: list[list[int]], steps: int) -> None:
    samples = [make_sample(len(mask), mask, seed=i) for i, mask in enumerate(masks)]
    loss, plain, *_ = both_losses(samples, steps, 5)
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-6)


def test_a_document_is_blind_to_its_neighbours() -> None:
    target, vocabulary = make_target(), make_vocabulary()
    drafter = make_drafter(target, vocabulary)
    samples = [make_sample(9, seed=1), make_sample(15, seed=2), make_sample(6, seed=3)]
    packed = pack(samples, steps=3, dtype=torch.float32, device="cpu")
    together = ttt_hidden(drafter, target.embedding, packed)
    for k in range(3):
        apart = torch.cat(
            [
                ttt_hidden(drafter, target.embedding, pack([s], steps=3, dtype=torch.float32, device="cpu"))[
                    k
                ]
                for s in samples
            ]
        )
        torch.testing.assert_close(together[k], apart)


def test_chains_hold_the_states_of_the_full_computation() -> None:
    target, vocabulary = make_target(), make_vocabulary()
    drafter = make_drafter(target, vocabulary)
    sample = make_sample(12, TWO_TURNS, seed=3)
    hidden = ttt_hidden(drafter, target.embedding, pack([sample], steps=3, dtype=torch.float32, device="cpu"))
    from changeover.drafter.data import bf16_tensor

    every = document_hidden(
        drafter, target.embedding, bf16_tensor(sample.aux).float(), torch.from_numpy(sample.input_ids), 3
    )
    for k, slots in enumerate(chain_slots(sample.loss_mask, 3)):
        torch.testing.assert_close(hidden[k], every[k][slots])


def test_merging_by_log_sum_exp_equals_attention_over_all_keys() -> None:
    """The CUDA path's merge: attention over shared keys plus one own key a row, against one softmax over
    both.
    """
    generator = torch.Generator().manual_seed(0)
    rows, shared, heads, kv_heads, size = 6, 9, 4, 2, 8
    q = torch.randn(rows, heads, size, generator=generator)
    keys, values = (torch.randn(shared, kv_heads, size, generator=generator) for _ in range(2))
    own = [tuple(torch.randn(rows, kv_heads, size, generator=generator) for _ in range(2)) for _ in range(3)]
    scale = size**-0.5
    scores = torch.einsum("rhd,khd->rhk", q, keys.repeat_interleave(2, 1)) * scale
    out = torch.einsum("rhk,khd->rhd", scores.softmax(-1), values.repeat_interleave(2, 1))
    merged = merge_diagonals(out, scores.logsumexp(-1), q, own)
    diagonal = torch.stack([(q * k.repeat_interleave(2, 1)).sum(-1) * scale for k, _ in own], -1)
    weights = torch.cat([scores, diagonal], -1).softmax(-1)
    expected = torch.einsum("rhk,khd->rhd", weights[..., :shared], values.repeat_interleave(2, 1))
    for index, (_, v) in enumerate(own):
        expected = expected + weights[..., shared + index, None] * v.repeat_interleave(2, 1)
    torch.testing.assert_close(merged, expected)
