"""Choosing the next token: greedy, or temperature with nucleus (top-p) sampling from a generator of the
request's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingParams:
    """How a request wants its tokens chosen and where they end.

    ``temperature`` 0 is greedy; ``max_tokens`` counts every generated token, an end-of-sequence token
    included.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def new_generator(params: SamplingParams) -> torch.Generator | None:
    """The request's own random numbers, so that its answer does not depend on what else the server runs."""
    if params.greedy:
        return None
    generator = torch.Generator(device="cpu")
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed % 2**63)
    return generator


def sample(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator | None) -> int:
    """One token id from ``logits`` ``[vocab]`` (float32).

    Top-p keeps the smallest set of most probable tokens whose probabilities reach ``top_p``; the first always
    stays.
    """
    if params.greedy or generator is None:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.cpu() / params.temperature, dim=-1)
    if params.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        ordered[before >= params.top_p] = 0.0
        choice = torch.multinomial(ordered, 1, generator=generator)
        return int(order[choice])
    return int(torch.multinomial(probabilities, 1, generator=generator))
