"""Attention of the training-time test over packed documents.

Step 0 is causal within a document. A chain at step k sees the step-0 keys up to its own slot, and its own
keys of the steps 1 .. k; nobody else sees those (the mask ``[causal | diagonal | diagonal ...]`` of the
EAGLE-3 code). The diagonals are one dot product a row, so they are added as columns or merged by log-sum-exp,
never as key blocks.

Two ways to compute the same: :class:`PaddedAttention` lays the documents side by side for this one operation
(CPU: short documents, no kernel needed); :class:`FlexAttention` keeps them packed (CUDA).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from changeover.drafter.data import PackedBatch

Diagonal = tuple[Tensor, Tensor]  # keys and values of one later step, each [R, kv_heads, head_dim]


class TTTAttention(Protocol):
    def attend(
        self, step: int, q: Tensor, keys: Tensor, values: Tensor, diagonals: Sequence[Diagonal]
    ) -> Tensor:
        """q [R, heads, d]; keys, values [N, kv_heads, d] of step 0 -> [R, heads, d]."""
        ...


def attention_for(batch: PackedBatch) -> TTTAttention:
    return FlexAttention(batch) if batch.aux.is_cuda else PaddedAttention(batch)


class PaddedAttention:
    """Documents as a grid [D, longest], for attention alone: padding costs score columns, not layer rows."""

    def __init__(self, batch: PackedBatch) -> None:
        device = batch.aux.device
        self._key_grid = _grid(batch.lengths, device)
        self._query_grids = [_grid(counts, device) for counts in batch.chain_counts]
        starts = self._key_grid[:, :1]
        columns = torch.arange(self._key_grid.shape[1], device=device)
        self._hidden_from, self._places = [], []
        for chains, counts, grid in zip(batch.chains, batch.chain_counts, self._query_grids, strict=True):
            if chains.slots.numel() == 0:
                self._hidden_from.append(torch.zeros(0, dtype=torch.bool, device=device))
                self._places.append(chains.slots)
                continue
            own_column = chains.slots[grid] - starts
            self._hidden_from.append((columns > own_column[..., None])[:, None, None])
            documents = torch.repeat_interleave(
                torch.arange(len(counts), device=device), torch.tensor(counts, device=device)
            )
            first = grid[:, 0][documents]
            self._places.append(
                documents * grid.shape[1] + torch.arange(chains.slots.numel(), device=device) - first
            )

    def attend(
        self, step: int, q: Tensor, keys: Tensor, values: Tensor, diagonals: Sequence[Diagonal]
    ) -> Tensor:
        heads, size = q.shape[1:]
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        grid = self._query_grids[step]
        documents, longest = grid.shape
        columns = self._key_grid.shape[1]
        # [D, kv, group, R, d] against [D, kv, 1, T, d]
        qg = (
            (q / math.sqrt(size))[grid].view(documents, longest, kv_heads, group, size).permute(0, 2, 3, 1, 4)
        )
        kg = keys[self._key_grid].permute(0, 2, 3, 1)
        vg = values[self._key_grid].permute(0, 2, 1, 3)
        flat = qg.reshape(documents, kv_heads, group * longest, size)
        scores = (flat @ kg).view(documents, kv_heads, group, longest, columns)
        scores = scores.masked_fill(self._hidden_from[step], float("-inf"))
        own = [(qg * k[grid].permute(0, 2, 1, 3)[:, :, None]).sum(-1, keepdim=True) for k, _ in diagonals]
        weights = torch.cat([scores, *own], dim=-1).float().softmax(-1).to(q.dtype)
        past = weights[..., :columns].reshape(documents, kv_heads, group * longest, columns) @ vg
        out = past.view(documents, kv_heads, group, longest, size)
        for index, (_, v) in enumerate(diagonals):
            out = out + weights[..., columns + index, None] * v[grid].permute(0, 2, 1, 3)[:, :, None]
        return out.permute(0, 3, 1, 2, 4).reshape(documents * longest, heads, size)[self._places[step]]


def _grid(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int64 [D, longest]: packed row of each place; places past a document's end repeat a row that exists."""
    sizes = torch.tensor(lengths, device=device)
    starts = sizes.cumsum(0) - sizes
    total = int(sum(lengths))
    grid = starts[:, None] + torch.arange(max(lengths), device=device)
    return grid.clamp_(max=max(total - 1, 0))


class FlexAttention:
    """Packed documents through torch's FlexAttention; the chains' own keys are merged in fp32."""

    def __init__(self, batch: PackedBatch) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        device = batch.aux.device
        documents = torch.repeat_interleave(
            torch.arange(len(batch.lengths), device=device), torch.tensor(batch.lengths, device=device)
        )
        n_slots = documents.numel()
        self._masks: list[Any] = []
        for chains in batch.chains:
            slots = chains.slots

            def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, slots: Tensor = slots) -> Tensor:
                return (slots[q] >= kv) & (documents[slots[q]] == documents[kv])

            self._masks.append(
                create_block_mask(visible, None, None, slots.numel(), n_slots, device=str(device))
            )

    def attend(
        self, step: int, q: Tensor, keys: Tensor, values: Tensor, diagonals: Sequence[Diagonal]
    ) -> Tensor:
        flex = _compiled_flex()
        out, lse = flex(
            _batched(q),
            _batched(keys),
            _batched(values),
            block_mask=self._masks[step],
            enable_gqa=True,
            return_lse=True,
        )
        out, lse = out[0].transpose(0, 1), lse[0].transpose(0, 1)
        return merge_diagonals(out, lse, q, diagonals) if diagonals else out


def merge_diagonals(out: Tensor, lse: Tensor, q: Tensor, diagonals: Sequence[Diagonal]) -> Tensor:
    """Add one key a row to a finished attention: out [R, heads, d] with its log-sum-exp [R, heads] (natural
    log).
    """
    heads, size = q.shape[1:]
    group = heads // diagonals[0][0].shape[1]
    own = [
        (q.float() * k.float().repeat_interleave(group, 1)).sum(-1) / math.sqrt(size) for k, _ in diagonals
    ]
    weights = torch.stack([lse.float(), *own], dim=-1).softmax(-1)
    merged = out.float() * weights[..., 0, None]
    for index, (_, v) in enumerate(diagonals):
        merged = merged + weights[..., index + 1, None] * v.float().repeat_interleave(group, 1)
    return merged.to(q.dtype)


def _batched(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


_flex: Any = None


def _compiled_flex() -> Any:
    global _flex
    if _flex is None:
        from torch.nn.attention.flex_attention import flex_attention

        _flex = torch.compile(flex_attention, dynamic=True)
    return _flex
