"""EAGLE-3 folders for tests, written from the published format and not by our exporter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def random_weights(target: dict[str, Any], *, draft_vocab: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of a random drafter that fits a target's config.json; d2t keeps every ``vocab // draft_vocab``-th id."""
    generator = torch.Generator().manual_seed(seed)
    hidden, heads = target["hidden_size"], target["num_attention_heads"]
    kv_heads, head_dim = target["num_key_value_heads"], target["head_dim"]
    inner = 2 * hidden

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    stride = target["vocab_size"] // draft_vocab
    kept = torch.arange(draft_vocab) * stride
    seen = torch.zeros(target["vocab_size"], dtype=torch.bool)
    seen[kept] = True
    return {
        "fc.weight": draw(hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": draw(heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": draw(kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": draw(kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": draw(hidden, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": draw(inner, hidden),
        "midlayer.mlp.up_proj.weight": draw(inner, hidden),
        "midlayer.mlp.down_proj.weight": draw(hidden, inner),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": draw(draft_vocab, hidden),
        "d2t": kept - torch.arange(draft_vocab),
        "t2d": seen,
    }


def drafter_config(target: dict[str, Any], *, draft_vocab: int, boundaries: list[int]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target["hidden_size"],
        "intermediate_size": 2 * target["hidden_size"],
        "num_attention_heads": target["num_attention_heads"],
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": target["head_dim"],
        "num_hidden_layers": 1,
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": draft_vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": boundaries,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [b - 1 for b in boundaries],
            "use_aux_hidden_state": True,
        },
    }


def write_drafter(
    folder: Path,
    model_dir: Path,
    *,
    draft_vocab: int = 64,
    only_token: int | None = None,
    boundaries: list[int] | None = None,
    seed: int = 0,
) -> Path:
    """A random drafter for the model; with ``only_token`` every draft id means this one token of the target's."""
    target = json.loads((model_dir / "config.json").read_text())
    weights = random_weights(target, draft_vocab=draft_vocab, seed=seed)
    if only_token is not None:
        weights["d2t"] = only_token - torch.arange(draft_vocab)
    layers = target["num_hidden_layers"]
    chosen = boundaries or [2, layers // 2, layers - 3]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    config = drafter_config(target, draft_vocab=draft_vocab, boundaries=chosen)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
