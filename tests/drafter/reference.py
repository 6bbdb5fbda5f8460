"""Training-time test the plain way: one document at a time, all slots at every step, whole masks and whole
logits.

Written from the papers' description, apart from the packed code that it judges: ``[causal | diag | diag
...]`` as one boolean mask, targets by shifting, autograd for every gradient.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from changeover.drafter.data import bf16_tensor
from changeover.drafter.model import Drafter
from changeover.states.store import Sample


def document_hidden(
    drafter: Drafter,
    embedding: Tensor,
    aux: Tensor,
    token_ids: Tensor,
    steps: int,
    following: Tensor | None = None,
) -> list[Tensor]:
    """States before the norm of every slot at every step, [T-1, H] each.

    Later steps read past the document's end: ``following`` there, or its last token again.
    """
    shape = drafter.shape
    slots = token_ids.numel() - 1
    group = shape.heads // shape.kv_heads
    layer = drafter.midlayer
    hidden = drafter.project(aux[:slots].flatten(1))
    padded = torch.cat([token_ids, token_ids[-1:].expand(steps) if following is None else following])
    keys: list[Tensor] = []
    values: list[Tensor] = []
    out = []
    for k in range(steps):
        emb = F.embedding(padded[1 + k : 1 + k + slots], embedding)
        x = torch.cat([layer.input_layernorm(emb), layer.hidden_norm(hidden)], -1)
        positions = torch.arange(slots) + k
        q = layer.self_attn.queries(x, positions)
        new_keys, new_values = layer.self_attn.keys_values(x, positions)
        keys.append(new_keys)
        values.append(new_values)
        all_keys = torch.cat(keys).repeat_interleave(group, 1)
        all_values = torch.cat(values).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, all_keys) / math.sqrt(shape.head_dim)
        causal = torch.ones(slots, slots, dtype=torch.bool).tril()
        mask = torch.cat([causal] + [torch.eye(slots, dtype=torch.bool)] * k, dim=1)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, all_values)
        hidden = hidden + layer.self_attn.o_proj(attended.flatten(1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        out.append(hidden)
    return out


def reference_loss(
    drafter: Drafter,
    embedding: Tensor,
    target_head: Tensor,
    samples: list[Sample],
    steps: int,
    decay: float,
) -> Tensor:
    total = torch.zeros(())
    supervised = 0
    for sample in samples:
        aux, last = bf16_tensor(sample.aux).float(), bf16_tensor(sample.last).float()
        hidden = document_hidden(drafter, embedding, aux, torch.from_numpy(sample.input_ids), steps)
        mask = sample.loss_mask
        for k, states in enumerate(hidden):
            log_q = torch.log_softmax(drafter.lm_head(drafter.norm(states)), -1)
            for slot in range(len(mask) - 1):
                judged = slot + 1 + k
                if judged >= len(mask) or not mask[slot + 1 : judged + 1].all():
                    continue
                supervised += k == 0
                log_p = torch.log_softmax(last[judged] @ target_head.t(), -1)
                total = total + decay**k * (log_p.exp() * (log_p - log_q[slot])).sum()
    return total / supervised
