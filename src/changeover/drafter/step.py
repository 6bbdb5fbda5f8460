"""One training-time test: the drafter run on its own states for several steps, as it will be when it serves.

Only what has a loss is computed: the keys and values of step 0 for all slots, everything else for the slots
with a chain (see data.py), which are fewer at each step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from changeover.drafter.attention import attention_for
from changeover.drafter.data import PackedBatch
from changeover.drafter.loss import linear_kl, plan_loss
from changeover.drafter.model import Drafter


@dataclass(frozen=True)
class Frozen:
    """The target's tensors that a step reads: ``embedding`` [V, H]; ``head`` [Dv, H], its rows of the draft
    vocabulary.
    """

    embedding: Tensor
    head: Tensor


@dataclass(frozen=True)
class StepLoss:
    """``loss`` to call backward on; ``kl`` the mean KL in nats of each step (detached, [steps])."""

    loss: Tensor
    kl: Tensor


def ttt_hidden(drafter: Drafter, embedding: Tensor, batch: PackedBatch) -> list[Tensor]:
    """States before the final norm of each step's chains, [R_k, H] each."""
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    who_sees_whom = attention_for(batch)
    hidden = drafter.project(batch.aux)
    x = layer.attention_input(F.embedding(batch.tokens, embedding), hidden)
    keys, values = attention.keys_values(x, batch.positions)
    first = batch.chains[0]
    q = attention.queries(x[first.slots], first.positions)
    hidden = layer.after_attention(hidden[first.slots], who_sees_whom.attend(0, q, keys, values, []))
    steps = [hidden]
    diagonals: list[tuple[Tensor, Tensor]] = []
    for k, chains in enumerate(batch.chains[1:], start=1):
        if chains.slots.numel() == 0:
            steps.append(hidden[:0])
            continue
        kept = chains.within_previous
        hidden = hidden[kept]
        x = layer.attention_input(F.embedding(chains.tokens, embedding), hidden)
        own = attention.keys_values(x, chains.positions)
        diagonals = [(k_[kept], v_[kept]) for k_, v_ in diagonals] + [own]
        q = attention.queries(x, chains.positions)
        hidden = layer.after_attention(hidden, who_sees_whom.attend(k, q, keys, values, diagonals))
        steps.append(hidden)
    return steps


def ttt_loss(
    drafter: Drafter,
    frozen: Frozen,
    batch: PackedBatch,
    *,
    step_decay: float = 0.8,
    chunk_targets: int = 128,
) -> StepLoss:
    """KL to the target at every step's supervised rows, weighted ``step_decay**k``.

    Under torch.autocast the heads are applied in the autocast type; otherwise in the drafter's.
    """
    device = batch.aux.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else batch.aux.dtype
    steps = ttt_hidden(drafter, frozen.embedding, batch)
    plan = plan_loss(batch.chains, step_decay=step_decay, chunk_targets=chunk_targets)
    hidden = drafter.norm(torch.cat(steps))[plan.order]
    loss, rows = linear_kl(hidden, drafter.lm_head.weight, batch.last, frozen.head, plan, dtype)
    by_row = torch.empty_like(rows)
    by_row[plan.order] = rows
    parts = by_row.split_with_sizes([step.shape[0] for step in steps])
    return StepLoss(
        loss, torch.stack([part.mean() if part.numel() else part.new_zeros(()) for part in parts])
    )
