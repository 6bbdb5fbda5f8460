"""From stored samples to packed batches: no padding, and only the rows whose loss is used.

Rows and slots. A sample of T rows has T-1 slots: slot t reads the states of row t and token t+1, and step 0
is judged against the target's distribution at row t+1 (which predicts token t+2). Step k of the training-time
test reads token t+1+k and is judged at row t+1+k. A slot has loss at step k when rows t+1 .. t+1+k are all
supervised: those are the chains that a server really drafts, whose first slot stands at the last committed
token of the prompt or later. So the slots of step k+1 are a subset of those of step k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from changeover.machine.errors import InvalidInput
from changeover.states.store import Sample


class SampleSource(Protocol):
    def read(self, position: int) -> Sample: ...


@dataclass(frozen=True)
class Chains:
    """The rows of one step. All int64 [R]."""

    slots: Tensor  # packed slot where the chain starts
    within_previous: Tensor  # its place among the rows of the step before
    tokens: Tensor  # input token of this step
    positions: Tensor  # rotary position of this step
    targets: Tensor  # its place among the supervised rows


@dataclass(frozen=True)
class PackedBatch:
    """N slots of several documents, one after the other; U supervised rows."""

    aux: Tensor  # [N, n_aux * H]
    tokens: Tensor  # int64 [N], token t+1
    positions: Tensor  # int64 [N], t within its document
    lengths: tuple[int, ...]  # slots of each document
    last: Tensor  # [U, H], post-norm states of the supervised rows
    chains: tuple[Chains, ...]
    chain_counts: tuple[tuple[int, ...], ...]  # rows of each document, for each step
    rows: int  # stored rows read, for tokens a second


def bf16_tensor(values: npt.NDArray[np.uint16]) -> Tensor:
    """The store's uint16 view of bf16 as a torch.bfloat16 tensor of the same shape."""
    return torch.from_numpy(np.ascontiguousarray(values).view(np.int16)).view(torch.bfloat16)


def chain_slots(loss_mask: npt.NDArray[np.uint8], steps: int) -> list[npt.NDArray[np.int64]]:
    """For one document: the slots with loss at step 0 .. steps-1 (see the module's docstring)."""
    supervised = loss_mask[1:].astype(np.bool_)
    alive = supervised.copy()
    slots = [np.flatnonzero(alive)]
    for step in range(1, steps):
        shifted = np.zeros_like(supervised)
        shifted[: max(supervised.size - step, 0)] = supervised[step:]
        alive &= shifted
        slots.append(np.flatnonzero(alive))
    return slots


def pack(samples: Sequence[Sample], *, steps: int, dtype: torch.dtype, device: str) -> PackedBatch:
    """Pack documents; those without a supervised slot add nothing. InvalidInput when that is all of them."""
    aux, last, tokens, positions = [], [], [], []
    per_step: list[list[tuple[npt.NDArray[np.int64], ...]]] = [[] for _ in range(steps)]
    lengths: list[int] = []
    counts: list[list[int]] = [[] for _ in range(steps)]
    slot_base = target_base = 0
    for sample in samples:
        n_slots = sample.input_ids.size - 1
        by_step = chain_slots(sample.loss_mask, steps)
        if by_step[0].size == 0:
            continue
        rank = np.full(n_slots, -1, dtype=np.int64)
        rank[by_step[0]] = np.arange(by_step[0].size)
        before = np.arange(n_slots)
        for step, slots in enumerate(by_step):
            per_step[step].append(
                (
                    slot_base + slots,
                    np.searchsorted(before, slots) + sum(counts[step - 1]) if step else slots,
                    sample.input_ids[slots + 1 + step],
                    slots + step,
                    target_base + rank[slots + step],
                )
            )
            before = slots
        for step, slots in enumerate(by_step):
            counts[step].append(slots.size)
        lengths.append(n_slots)
        aux.append(bf16_tensor(sample.aux[:n_slots]).flatten(1))
        last.append(bf16_tensor(sample.last[1:][by_step[0]]))
        tokens.append(torch.from_numpy(sample.input_ids[1:]))
        positions.append(torch.arange(n_slots))
        slot_base += n_slots
        target_base += by_step[0].size

    if not lengths:
        raise InvalidInput(
            expected="at least one sample with supervised rows after its first row",
            seen=f"{len(samples)} samples, none of them with any",
            todo="Collect states with answers (loss_mask 1 on generated rows).",
        )

    def joined(step: int) -> Chains:
        columns = [torch.from_numpy(np.concatenate(c)).to(device) for c in zip(*per_step[step], strict=True)]
        return Chains(*columns)

    return PackedBatch(
        aux=torch.cat(aux).to(device=device, dtype=dtype),
        tokens=torch.cat(tokens).to(device),
        positions=torch.cat(positions).to(device),
        lengths=tuple(lengths),
        last=torch.cat(last).to(device=device, dtype=dtype),
        chains=tuple(joined(step) for step in range(steps)),
        chain_counts=tuple(tuple(c) for c in counts),
        rows=sum(int(s.input_ids.size) for s in samples),
    )


def plan_epoch(rows: Sequence[int], batch_rows: int, *, seed: int, epoch: int) -> list[list[int]]:
    """Which samples make which batch: an order drawn from (seed, epoch) only, filled greedily to
    ``batch_rows``.

    A pure function of its arguments, so that (epoch, batch) is the whole data position of a checkpoint. A
    sample longer than ``batch_rows`` makes a batch alone.
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(rows))
    batches: list[list[int]] = []
    filled = batch_rows
    for index in order.tolist():
        if filled and filled + rows[index] > batch_rows:
            batches.append([])
            filled = 0
        batches[-1].append(index)
        filled += rows[index]
    return batches


def read_ahead(source: SampleSource, batches: Sequence[Sequence[int]]) -> Iterator[list[Sample]]:
    """The batches' samples in order, the next one being read while the caller works on this one."""

    def read(batch: Sequence[int]) -> list[Sample]:
        return [source.read(index) for index in batch]

    with ThreadPoolExecutor(max_workers=1) as reader:
        ahead = None
        for batch in batches:
            following = reader.submit(read, batch)
            if ahead is not None:
                yield ahead.result()
            ahead = following
        if ahead is not None:
            yield ahead.result()
