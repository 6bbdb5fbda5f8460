"""One training step of ours against the plain way of doing it, alternating in one process.

The plain step is what most public trainers do: every sample padded to the longest, all slots computed at every
step, ``[causal | diagonal ...]`` as a materialised mask, logits of all positions over the draft vocabulary, the
teacher's logits over the whole vocabulary. Same model, same weights, same data, same result (checked first).

    python benchmarks/drafter_step.py --out benchmarks/results/drafter_step_cpu.json
    python benchmarks/drafter_step.py --device cuda --out benchmarks/results/drafter_step_cuda.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from changeover.drafter.data import bf16_tensor, pack
from changeover.drafter.model import Drafter, DrafterShape
from changeover.drafter.step import Frozen, ttt_loss
from changeover.drafter.target import RopeFacts
from changeover.states.store import Sample

DECAY = 0.8


@dataclass(frozen=True)
class Shapes:
    """``prompts`` and ``answers``: shortest and longest, in tokens."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    documents: int
    prompts: tuple[int, int]
    answers: tuple[int, int]


SMOLLM2_135M = Shapes(576, 1536, 9, 3, 64, 49152, 4096, 6, (30, 60), (40, 96))
LLAMA_8B = Shapes(4096, 14336, 32, 8, 128, 128256, 32000, 4, (300, 1200), (300, 1600))


def make_samples(shapes: Shapes, seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(shapes.documents):
        prompt, answer = int(rng.integers(*shapes.prompts)), int(rng.integers(*shapes.answers))
        rows = prompt + answer

        def states(*shape: int) -> np.ndarray:
            drawn = torch.randn(*shape, generator=generator).to(torch.bfloat16)
            return drawn.view(torch.int16).numpy().view(np.uint16)

        samples.append(
            Sample(
                id=str(index),
                input_ids=rng.integers(0, shapes.vocab, rows),
                loss_mask=np.array([0] * prompt + [1] * answer, dtype=np.uint8),
                aux=states(rows, 3, shapes.hidden),
                last=states(rows, shapes.hidden),
            )
        )
    return samples


def plain_step(
    drafter: Drafter,
    embedding: Tensor,
    target_head: Tensor,
    kept: Tensor,
    samples: list[Sample],
    steps: int,
    device: str,
) -> Tensor:
    """Padded, everything everywhere; returns the loss."""
    shape, layer = drafter.shape, drafter.midlayer
    documents, longest = len(samples), max(s.input_ids.size for s in samples)
    wide = longest - 1

    def padded(row: Callable[[Sample], Tensor], dtype: torch.dtype) -> Tensor:
        rows = [row(s).to(dtype) for s in samples]
        return torch.stack(
            [F.pad(r, [0, 0] * (r.dim() - 1) + [0, longest + steps - len(r)]) for r in rows]
        ).to(device)

    ids = padded(lambda s: torch.from_numpy(s.input_ids), torch.long)
    mask = padded(lambda s: torch.from_numpy(s.loss_mask), torch.long).bool()
    hidden = drafter.project(
        padded(lambda s: bf16_tensor(s.aux).flatten(1), torch.float32)[:, :wide].flatten(0, 1)
    )
    with torch.no_grad():
        teacher = (padded(lambda s: bf16_tensor(s.last), torch.float32) @ target_head.t())[..., kept].float()
        p = teacher.softmax(-1)
        negative_entropy = (p * p.clamp_min(1e-30).log()).sum(-1)
    causal = torch.ones(wide, wide, dtype=torch.bool, device=device).tril()
    own = torch.eye(wide, dtype=torch.bool, device=device)
    group = shape.heads // shape.kv_heads
    keys: list[Tensor] = []
    values: list[Tensor] = []
    alive = torch.ones(documents, wide, dtype=torch.bool, device=device)
    total = torch.zeros((), device=device)
    rows = mask[:, 1 : 1 + wide].sum()
    for k in range(steps):
        emb = F.embedding(ids[:, 1 + k : 1 + k + wide].flatten(), embedding)
        x = layer.attention_input(emb, hidden)
        positions = (torch.arange(wide, device=device) + k).repeat(documents)
        q = layer.self_attn.queries(x, positions).view(documents, wide, shape.heads, -1).transpose(1, 2)
        new_keys, new_values = layer.self_attn.keys_values(x, positions)
        keys.append(new_keys.view(documents, wide, shape.kv_heads, -1).transpose(1, 2))
        values.append(new_values.view(documents, wide, shape.kv_heads, -1).transpose(1, 2))
        all_keys = torch.cat(keys, 2).repeat_interleave(group, 1)
        all_values = torch.cat(values, 2).repeat_interleave(group, 1)
        scores = (q @ all_keys.transpose(2, 3)).float() / math.sqrt(shape.head_dim)
        scores = scores.masked_fill(~torch.cat([causal] + [own] * k, 1), float("-inf"))
        attended = (scores.softmax(-1).to(q.dtype) @ all_values).transpose(1, 2)
        hidden = layer.after_attention(hidden, attended.flatten(0, 1))
        log_q = drafter.lm_head(drafter.norm(hidden)).float().log_softmax(-1).view(documents, wide, -1)
        alive = alive & mask[:, 1 + k : 1 + k + wide]
        kl = negative_entropy[:, 1 + k : 1 + k + wide] - (p[:, 1 + k : 1 + k + wide] * log_q).sum(-1)
        total = total + DECAY**k * (kl * alive).sum()
    return total / rows


def measure(shapes: Shapes, *, device: str, steps: int, repeats: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    shape = DrafterShape(
        hidden=shapes.hidden,
        intermediate=shapes.intermediate,
        heads=shapes.heads,
        kv_heads=shapes.kv_heads,
        head_dim=shapes.head_dim,
        rms_norm_eps=1e-5,
        rope=RopeFacts(1e5),
        max_positions=8192,
        hidden_act="silu",
        vocab=shapes.vocab,
        draft_vocab=shapes.draft_vocab,
        boundaries=(2, 15, 27),
    )
    drafter = Drafter(shape).to(device)
    embedding = torch.randn(shapes.vocab, shapes.hidden, device=device) * 0.1
    target_head = torch.randn(shapes.vocab, shapes.hidden, device=device) * 0.1
    kept = torch.randperm(shapes.vocab)[: shapes.draft_vocab].sort().values.to(device)
    low = torch.bfloat16 if device == "cuda" else torch.float32
    frozen = Frozen(embedding, target_head[kept].to(low))
    samples = make_samples(shapes, seed)

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")

    def ours() -> Tensor:
        with autocast():
            batch = pack(samples, steps=steps, dtype=torch.float32, device=device)
            loss = ttt_loss(
                drafter, frozen, batch, step_decay=DECAY, chunk_targets=128 if device == "cpu" else 1024
            ).loss
        loss.backward()
        return loss.detach()

    def plain() -> Tensor:
        with autocast():
            loss = plain_step(drafter, embedding, target_head, kept, samples, steps, device)
        loss.backward()
        return loss.detach()

    def timed(step: Callable[[], Tensor]) -> tuple[float, float, float]:
        drafter.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0
        return time.perf_counter() - wall, time.process_time() - cpu, peak

    losses = {"ours": float(ours()), "plain": float(plain())}
    if not math.isclose(losses["ours"], losses["plain"], rel_tol=1e-3 if device == "cpu" else 2e-2):
        raise SystemExit(f"the two steps disagree, nothing to compare: {losses}")
    for _ in range(2):
        timed(ours), timed(plain)
    pairs = [(timed(ours), timed(plain)) for _ in range(repeats)]
    clock = 0 if device == "cuda" else 1  # CPU seconds: other processes' share of the cores does not count
    ratios = sorted(plain_time[clock] / our_time[clock] for our_time, plain_time in pairs)
    rows = sum(s.input_ids.size for s in samples)
    return {
        "shapes": shapes.__dict__,
        "rows": rows,
        "supervised_rows": int(sum(s.loss_mask.sum() for s in samples)),
        "ttt_steps": steps,
        "losses": losses,
        "clock": "wall seconds" if device == "cuda" else "CPU seconds of the process",
        "ours_s": statistics.median(ours[clock] for ours, _ in pairs),
        "plain_s": statistics.median(plain[clock] for _, plain in pairs),
        "ours_tokens_per_s": rows / statistics.median(ours[clock] for ours, _ in pairs),
        "plain_tokens_per_s": rows / statistics.median(plain[clock] for _, plain in pairs),
        "ratio_plain_to_ours": {"median": statistics.median(ratios), "min": ratios[0], "max": ratios[-1]},
        "peak_mib": {"ours": max(o[2] for o, _ in pairs), "plain": max(p[2] for _, p in pairs)},
        "repeats": repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shapes", choices=["smollm2-135m", "llama-8b"], help="default: by device")
    parser.add_argument("--ttt-steps", type=int, default=None, help="default: 3 on cpu, 7 on cuda")
    parser.add_argument("--documents", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    name = given.shapes or ("llama-8b" if given.device == "cuda" else "smollm2-135m")
    shapes = LLAMA_8B if name == "llama-8b" else SMOLLM2_135M
    if given.documents:
        shapes = Shapes(**{**shapes.__dict__, "documents": given.documents})
    steps = given.ttt_steps or (7 if given.device == "cuda" else 3)
    result = {
        "benchmark": "drafter_step",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if given.device == "cuda" else platform.processor() or "cpu",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "model": name,
        **measure(shapes, device=given.device, steps=steps, repeats=given.repeats, seed=given.seed),
    }
    print(json.dumps(result, indent=2))
    if given.out:
        given.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
