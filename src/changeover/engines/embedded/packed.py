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
    """Keys and values of one sequence, all layers: ``[layers, 2, 1, kv_heads, capacity, head_dim]``.

    ``length`` counts the tokens that are valid; what lies behind it is overwritten by the next segment.
    """

    def __init__(
        self, *, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (layers, 2, 1, kv_heads, FIRST_CAPACITY_TOKENS, head_dim)
        self._use(torch.empty(shape, dtype=dtype, device=device))
        self.length = 0

    def _use(self, store: torch.Tensor) -> None:
        self._store = store
        # Views made once: at small batches making them anew for every layer and token costs as much as attention.
        self.layers = [(layer[0], layer[1]) for layer in store.unbind(0)]

    @property
    def capacity(self) -> int:
        return self._store.shape[4]

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` in all, doubling so that copying stays linear in the final length."""
        if tokens <= self.capacity:
            return
        capacity = self.capacity
        while capacity < tokens:
            capacity *= 2
        old = self._store
        grown = old.new_empty((*old.shape[:4], capacity, old.shape[5]))
        grown[:, :, :, :, : self.length] = old[:, :, :, :, : self.length]
        self._use(grown)

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[kv_heads, new, head_dim]`` behind the valid tokens; return all keys and values, the new
        included, as ``[1, kv_heads, total, head_dim]``.

        ``length`` does not move: every layer writes the same tokens, and the caller commits them once at the end.
        """
        end = self.length + key.shape[1]
        all_keys, all_values = self.layers[layer]
        all_keys[0, :, self.length : end] = key
        all_values[0, :, self.length : end] = value
        return all_keys[:, :, :end], all_values[:, :, :end]


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

    @property
    def decoding(self) -> bool:
        """Whether every segment is a single token."""
        return len(self.segments) == self.starts[-1]

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
    _, kv_heads, total, _ = keys.shape
    group = heads // kv_heads
    mask, causal = None, new == total
    if not causal or (window is not None and total > window):
        query_at = torch.arange(total - new, total, device=query.device).unsqueeze(1)
        key_at = torch.arange(total, device=query.device).unsqueeze(0)
        mask, causal = key_at <= query_at, False
        if window is not None:
            mask &= key_at > query_at - window
    shape = (kv_heads, group, total, head_dim)
    attended = functional.scaled_dot_product_attention(
        query.view(kv_heads, group, new, head_dim),
        keys[0].unsqueeze(1).expand(shape),
        values[0].unsqueeze(1).expand(shape),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
    )
    return attended.reshape(heads, new, head_dim)


def attend_decoding(
    batch: PackedBatch,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """The same where every segment is one token: ``[heads, rows, head_dim]`` in, ``[rows, heads, head_dim]`` out.

    The heads of a group act as query rows of one key head, so nothing is masked and no key is repeated. Few small
    operations a sequence: they are what a step of many sequences spends its time on beside the weights.
    """
    heads, rows, head_dim = query.shape
    kv_heads = key.shape[0]
    grouped = query.transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, head_dim)
    attended = []
    for segment, one_query, one_key, one_value in zip(
        batch.segments, grouped.unsqueeze(1).unbind(0), key.unbind(1), value.unbind(1), strict=True
    ):
        at = segment.cache.length
        keys, values = segment.cache.layers[layer]
        keys[0, :, at] = one_key
        values[0, :, at] = one_value
        start = 0 if window is None else max(0, at + 1 - window)
        attended.append(
            functional.scaled_dot_product_attention(
                one_query, keys[:, :, start : at + 1], values[:, :, start : at + 1], scale=scale
            )
        )
    return torch.cat(attended).view(rows, heads, head_dim)


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
    if packed_batch.decoding:
        rows = attend_decoding(packed_batch, layer, query[0], key[0], value[0], scaling, sliding_window)
        return rows.unsqueeze(0), None
    output = torch.empty_like(query)
    for segment, start, end in packed_batch.with_rows():
        keys, values = segment.cache.append(layer, key[0, :, start:end], value[0, :, start:end])
        output[0, :, start:end] = attend(query[0, :, start:end], keys, values, scaling, sliding_window)
    return output.transpose(1, 2), None
