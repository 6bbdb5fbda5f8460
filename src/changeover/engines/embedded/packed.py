"""One forward pass over the new tokens of many sequences, packed end to end without padding.

A *segment* is any number of new tokens of one sequence: a chunk of a prompt, one decoded token, or the tokens
that a verify step checks. The Hugging Face model sees a batch of one row with explicit positions; only
attention knows about segments: it appends keys and values to each sequence's own cache and attends within
that sequence. So prefill, decode and verify mix freely in one pass, nothing is computed for padding, and
rolling back a rejected draft is setting ``SequenceCache.length``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

ATTENTION_NAME = "changeover_packed"
FIRST_CAPACITY_TOKENS = 256


class SequenceCache:
    """Keys and values of one sequence, all layers: ``[layers, 2, kv_heads, capacity, head_dim]``.

    ``length`` counts the tokens that are valid; what lies behind it is overwritten by the next segment.
    """

    def __init__(
        self, *, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._store = torch.empty(
            (layers, 2, kv_heads, FIRST_CAPACITY_TOKENS, head_dim), dtype=dtype, device=device
        )
        self.length = 0

    @property
    def capacity(self) -> int:
        return self._store.shape[3]

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` in all, doubling so that copying stays linear in the final length."""
        if tokens <= self.capacity:
            return
        capacity = self.capacity
        while capacity < tokens:
            capacity *= 2
        layers, two, kv_heads, _, head_dim = self._store.shape
        grown = self._store.new_empty((layers, two, kv_heads, capacity, head_dim))
        grown[:, :, :, : self.length] = self._store[:, :, :, : self.length]
        self._store = grown

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[kv_heads, new, head_dim]`` behind the valid tokens; return all keys and values, the new
        included.

        ``length`` does not move: every layer writes the same tokens, and the caller commits them once at the
        end.
        """
        end = self.length + key.shape[1]
        keys, values = self._store[layer, 0, :, :end], self._store[layer, 1, :, :end]
        keys[:, self.length :] = key
        values[:, self.length :] = value
        return keys, values


@dataclass(frozen=True)
class Segment:
    """New tokens of one sequence and the cache that they extend."""

    token_ids: Sequence[int]
    cache: SequenceCache

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class PackedBatch:
    """Segments laid end to end: segment ``i`` owns rows ``starts[i]`` to ``starts[i + 1]``."""

    segments: tuple[Segment, ...]
    starts: tuple[int, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor

    def rows(self, index: int) -> slice:
        return slice(self.starts[index], self.starts[index + 1])

    def with_rows(self) -> Iterator[tuple[Segment, int, int]]:
        for index, segment in enumerate(self.segments):
            yield segment, self.starts[index], self.starts[index + 1]


def pack(segments: Sequence[Segment], device: torch.device) -> PackedBatch:
    """Lay segments end to end and reserve their caches' room. Shapes of the tensors: ``[1, rows]``."""
    ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    for segment in segments:
        past = segment.cache.length
        segment.cache.reserve(past + len(segment))
        ids.extend(segment.token_ids)
        positions.extend(range(past, past + len(segment)))
        starts.append(len(ids))
    return PackedBatch(
        segments=tuple(segments),
        starts=tuple(starts),
        input_ids=torch.tensor([ids], dtype=torch.int64, device=device),
        position_ids=torch.tensor([positions], dtype=torch.int64, device=device),
    )


def commit(batch: PackedBatch) -> None:
    """Count the tokens of a finished pass as valid; a verify step shortens ``length`` again afterwards."""
    for segment in batch.segments:
        segment.cache.length += len(segment)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of the last ``new`` tokens of one sequence over all of it.

    ``query`` is ``[heads, new, head_dim]``, ``keys`` and ``values`` are ``[kv_heads, total, head_dim]``; the
    result has the query's shape. Query heads are grouped over the key heads by a view, so no key is copied.
    """
    heads, new, head_dim = query.shape
    kv_heads, total, _ = keys.shape
    grouped = query.view(kv_heads, heads // kv_heads, new, head_dim)
    if new == 1:
        # One query position: the group's heads act as query rows of one head, and every key is in the past.
        if window is not None and total > window:
            keys, values = keys[:, -window:], values[:, -window:]
        attended = functional.scaled_dot_product_attention(
            grouped.transpose(1, 2), keys.unsqueeze(1), values.unsqueeze(1), scale=scale
        )
        return attended.transpose(1, 2).reshape(heads, new, head_dim)
    shape = (kv_heads, heads // kv_heads, total, head_dim)
    mask, causal = None, new == total
    if not causal or (window is not None and total > window):
        query_at = torch.arange(total - new, total, device=query.device).unsqueeze(1)
        key_at = torch.arange(total, device=query.device).unsqueeze(0)
        mask, causal = key_at <= query_at, False
        if window is not None:
            mask &= key_at > query_at - window
    attended = functional.scaled_dot_product_attention(
        grouped,
        keys.unsqueeze(1).expand(shape),
        values.unsqueeze(1).expand(shape),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
    )
    return attended.reshape(heads, new, head_dim)


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_batch: PackedBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in every layer.

    ``query`` is ``[1, heads, rows, head_dim]``, ``key`` and ``value`` have the key heads; the result is
    ``[1, rows, heads, head_dim]``. ``packed_batch`` comes through the model's keyword arguments.
    """
    layer = module.layer_idx
    output = torch.empty_like(query)
    for segment, start, end in packed_batch.with_rows():
        keys, values = segment.cache.append(layer, key[0, :, start:end], value[0, :, start:end])
        output[0, :, start:end] = attend(query[0, :, start:end], keys, values, scaling, sliding_window)
    return output.transpose(1, 2), None
