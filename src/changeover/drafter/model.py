"""The EAGLE-3 draft model, with the names and shapes that SGLang and vLLM load (``LlamaForCausalLMEagle3``).

::

    h      = fc(cat(aux))                                  # the target's states at three boundaries
    x      = cat(input_layernorm(emb), hidden_norm(h))     # [.., 2H]
    h'     = h + attention(x); h' = h' + mlp(post_attention_layernorm(h'))
    logits = lm_head(norm(h'))                             # over the draft vocabulary
    next step: h := h' (before the norm)

Slot t reads the states of row t and the embedding of token t+1, and proposes token t+2 (Li et al., EAGLE-3,
arXiv 2503.01840; servers: sglang ``models/llama_eagle3.py``, vllm ``models/llama_eagle3.py``). The module
holds the trained tensors only: the embedding stays the target's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from changeover.drafter.target import RopeFacts, TargetFacts, TargetWeights
from changeover.drafter.vocabulary import DraftVocabulary
from changeover.machine.errors import NotSupported

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class DrafterShape:
    """Sizes in elements; ``boundaries`` are the target's, in the order in which fc reads them."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeFacts
    max_positions: int
    hidden_act: str
    vocab: int
    draft_vocab: int
    boundaries: tuple[int, ...]


def shape_for_target(target: TargetFacts, draft_vocab: int, boundaries: tuple[int, ...]) -> DrafterShape:
    """One layer as wide as the target's, with the target's heads, MLP and RoPE."""
    return DrafterShape(
        hidden=target.hidden,
        intermediate=target.intermediate,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        max_positions=target.max_positions,
        hidden_act=target.hidden_act,
        vocab=target.vocab,
        draft_vocab=draft_vocab,
        boundaries=boundaries,
    )


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[.., size] -> the same; computed in fp32 as the servers do."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps).to(x.dtype)


def inverse_frequencies(rope: RopeFacts, head_dim: int) -> Tensor:
    """fp32 [head_dim / 2]; llama3 as in transformers' ``_compute_llama3_parameters``."""
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.type == "linear":
        return frequencies / rope.scaling["factor"]
    if rope.type == "llama3":
        factor, low, high = (rope.scaling[n] for n in ("factor", "low_freq_factor", "high_freq_factor"))
        turns = rope.scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return frequencies * (keep + (1.0 - keep) / factor)
    return frequencies


class Attention(nn.Module):
    """The projections; who attends to whom is the caller's (training packs, a server caches)."""

    inv_freq: Tensor

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        wide = 2 * shape.hidden
        self.q_proj = nn.Linear(wide, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(wide, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(wide, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.register_buffer("inv_freq", inverse_frequencies(shape.rope, shape.head_dim), persistent=False)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [N, 2H], positions [N] -> rotated queries [N, heads, head_dim]."""
        return self._rotate(self.q_proj(x).view(-1, self.shape.heads, self.shape.head_dim), positions)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, 2H], positions [N] -> rotated keys and values, each [N, kv_heads, head_dim]."""
        keys = self.k_proj(x).view(-1, self.shape.kv_heads, self.shape.head_dim)
        values = self.v_proj(x).view(-1, self.shape.kv_heads, self.shape.head_dim)
        return self._rotate(keys, positions), values

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None].float() * self.inv_freq
        cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class MLP(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)
        self.activation = ACTIVATIONS[shape.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def attention_input(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[N, H] embeddings and [N, H] states -> [N, 2H]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)

    def after_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The residual is the state before its norm: [N, H] and [N, heads, head_dim] -> [N, H]."""
        hidden = hidden + self.self_attn.o_proj(attended.flatten(1))
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Drafter(nn.Module):
    """The trained tensors, named as in the exported file, and ``aux_scale`` [n_aux * H], which export folds
    into fc.

    The target's states differ by orders of magnitude between boundaries and between channels (SmolLM2-135M:
    rms 3 to 92, single channels above 20,000). fc reads them divided by their rms, so that one learning rate
    suits all columns.
    """

    aux_scale: Tensor

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        if shape.hidden_act not in ACTIVATIONS:
            raise NotSupported(
                expected=f"hidden_act one of {', '.join(ACTIVATIONS)}",
                seen=shape.hidden_act,
                todo="Add the activation to drafter/model.py.",
            )
        self.shape = shape
        self.fc = nn.Linear(len(shape.boundaries) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = DraftLayer(shape)
        self.norm = RMSNorm(shape.hidden, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        self.register_buffer("aux_scale", torch.ones(len(shape.boundaries) * shape.hidden))

    def project(self, aux: Tensor) -> Tensor:
        """The target's states [N, n_aux * H] -> [N, H]."""
        out: Tensor = self.fc(aux / self.aux_scale.to(aux.dtype))
        return out


@torch.no_grad()
def initialise(drafter: Drafter, target: TargetWeights, vocabulary: DraftVocabulary, seed: int) -> None:
    """Start from the target where it can: its head's rows of the kept tokens, its final norm."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator))
    drafter.lm_head.weight.copy_(target.lm_head[torch.from_numpy(vocabulary.token_ids)])
    drafter.norm.weight.copy_(target.norm)
    for into_residual in (drafter.midlayer.self_attn.o_proj, drafter.midlayer.mlp.down_proj):
        into_residual.weight.mul_(0.5)
