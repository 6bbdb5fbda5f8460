"""KL divergence from the target's distribution to the drafter's, without logits for all rows.

Both heads are applied to a chunk of supervised rows at a time, for all steps of the chunk together: the
teacher's distribution of a row is computed once and used by every step that is judged at it, and the
gradients of the chunk are taken on the spot (forward), so that nothing of size rows x draft vocabulary
outlives its chunk.

The teacher is renormalised over the draft vocabulary. The full-vocabulary normaliser would weigh each row by
the probability that the target gives to the draft vocabulary; with a frequency-chosen vocabulary that is
close to 1 on the rows that can be accepted at all, the optimum for each row is the same, and it would cost
the target's whole head on every row (V/Dv times more: 12 times at 49k/4k).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from changeover.drafter.data import Chains


@dataclass(frozen=True)
class LossPlan:
    """The rows of all steps, one step after the other, in the order of the supervised row that judges them.

    ``order`` int64 [R] puts the steps' concatenated rows in that order; ``targets`` int64 [R] and ``weights``
    fp32 [R] are already in it. A chunk is (first row, end row, first target, end target).
    """

    order: Tensor
    targets: Tensor
    weights: Tensor
    chunks: tuple[tuple[int, int, int, int], ...]


def plan_loss(chains: tuple[Chains, ...], *, step_decay: float, chunk_targets: int) -> LossPlan:
    """Weights decay**k / (supervised rows): a mean over the first step's rows, later steps counting less."""
    n_targets = max(chains[0].targets.numel(), 1)
    all_targets = torch.cat([c.targets for c in chains])
    weights = torch.cat(
        [
            torch.full((c.targets.numel(),), step_decay**k / n_targets, device=c.targets.device)
            for k, c in enumerate(chains)
        ]
    )
    targets, order = torch.sort(all_targets, stable=True)
    firsts = list(range(0, chains[0].targets.numel(), chunk_targets))
    edges = torch.searchsorted(targets, torch.tensor([*firsts, n_targets], device=targets.device)).tolist()
    ends = [*firsts[1:], chains[0].targets.numel()]
    chunks = tuple(
        (edges[i], edges[i + 1], firsts[i], ends[i]) for i in range(len(firsts)) if edges[i] < edges[i + 1]
    )
    return LossPlan(order=order, targets=targets, weights=weights[order], chunks=chunks)


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        teacher_hidden: Tensor,
        teacher_head: Tensor,
        plan: LossPlan,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        head_low = head.to(dtype)
        hidden_low = hidden.to(dtype)
        grad_hidden = torch.empty_like(hidden_low)
        grad_head = torch.zeros_like(head, dtype=torch.float32)
        rows = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for first, end, target_first, target_end in plan.chunks:
                teacher = (teacher_hidden[target_first:target_end].to(dtype) @ teacher_head.t()).float()
                log_p = torch.log_softmax(teacher, dim=-1)
                p = log_p.exp()
                negative_entropy = (p * log_p).sum(-1)
                places = plan.targets[first:end] - target_first
                x = hidden_low[first:end]
                log_q = torch.log_softmax((x @ head_low.t()).float(), dim=-1)
                p_rows = p[places]
                rows[first:end] = negative_entropy[places] - torch.linalg.vecdot(p_rows, log_q)
                grad = log_q.exp_().sub_(p_rows).mul_(plan.weights[first:end, None]).to(dtype)
                torch.mm(grad, head_low, out=grad_hidden[first:end])
                grad_head += grad.t() @ x if dtype != torch.float32 else torch.mm(grad.t(), x)
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(rows)
        return (rows * plan.weights).sum(), rows

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_head * grad_loss, None, None, None, None


def linear_kl(
    hidden: Tensor,
    head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    plan: LossPlan,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Weighted KL(target || drafter) and the KL of each row (without gradient).

    hidden [R, H] in the plan's order, after the drafter's norm; head [Dv, H]; teacher_hidden [U, H] after the
    target's norm; teacher_head [Dv, H], the target's rows of the draft vocabulary, in ``dtype``, which both
    heads are applied in (softmax in fp32). Returns (scalar, fp32 [R]).
    """
    apply: Any = _LinearKL.apply
    loss, rows = apply(hidden, head, teacher_hidden, teacher_head, plan, dtype)
    return loss, rows
