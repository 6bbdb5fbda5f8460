"""AdamW in three speeds, with a warm-up and a cosine.

One learning rate for all tensors ruins a drafter that starts from the target's head: the head's and the final
norm's inputs are large and all move together, so that a step which is small for the layer moves every logit
by several nats. They get a fraction of the rate.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from changeover.drafter.model import Drafter

WARMUP_SHARE = 0.1
HEAD_SHARE = 0.3
HEAD_TENSORS = ("lm_head.weight", "norm.weight")
BETAS = (0.9, 0.95)


def learning_rate_factor(step: int, total: int) -> float:
    """Linear warm-up over the first tenth, then a cosine to zero at ``total`` (``step`` counts from 0)."""
    warmup = max(1, math.ceil(total * WARMUP_SHARE))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


class Optimizer:
    """AdamW over the drafter's parameters; ``learning_rate`` is the layer's peak rate."""

    def __init__(self, drafter: Drafter, learning_rate: float) -> None:
        named = dict(drafter.named_parameters())
        head = [named[name] for name in HEAD_TENSORS]
        layer = [parameter for name, parameter in named.items() if name not in HEAD_TENSORS]
        self._peaks = [learning_rate, learning_rate * HEAD_SHARE]
        self._adamw = torch.optim.AdamW(
            [{"params": layer}, {"params": head}],
            lr=learning_rate,
            betas=BETAS,
            weight_decay=0.0,
            fused=layer[0].is_cuda,
        )

    def step(self, factor: float) -> None:
        """Apply the gradients at ``factor`` of the peak rates, and clear them."""
        for group, peak in zip(self._adamw.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return self._adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._adamw.load_state_dict(state)
