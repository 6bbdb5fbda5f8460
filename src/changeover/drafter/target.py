"""What the trainer needs of the target model: its shape, and the three tensors that stay frozen.

Read from a Hugging Face folder as data (``config.json`` and safetensors); the model itself is never built, so
a target of any size costs the trainer its embedding and its head and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from changeover.machine.errors import InvalidInput

if TYPE_CHECKING:
    import torch

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeFacts:
    """Rotary embedding: ``type`` is one of ROPE_TYPES; ``scaling`` holds that type's own numbers."""

    theta: float
    type: str = "default"
    scaling: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TargetFacts:
    """Shape of the target's decoder layers; sizes in elements."""

    path: Path
    hidden: int
    layers: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rms_norm_eps: float
    rope: RopeFacts
    max_positions: int
    hidden_act: str
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def read_rope(config: Mapping[str, Any]) -> RopeFacts:
    """The target's RoPE from transformers 5 (``rope_parameters``) or 4 (``rope_theta`` + ``rope_scaling``).

    A type that the drafter does not compute (yarn, longrope ...) becomes plain RoPE with the same theta: the
    drafter has one layer and a position scheme of its own, and both servers read it from the drafter's
    config, not from the target's (the published Kimi drafters do the same: ``rope_scaling: null``).
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if kind not in ROPE_TYPES or kind == "default":
        return RopeFacts(theta=float(theta))
    scaling = {name: float(value) for name, value in parameters.items() if isinstance(value, (int, float))}
    if kind == "llama3" and "original_max_position_embeddings" not in scaling:
        scaling["original_max_position_embeddings"] = float(config["max_position_embeddings"])
    return RopeFacts(theta=float(theta), type=kind, scaling=scaling)


def read_target_facts(path: Path) -> TargetFacts:
    """Facts of the model in ``path``; raises InvalidInput when config.json lacks one that is needed."""
    file = path / "config.json"
    if not file.is_file():
        raise InvalidInput(
            expected="a Hugging Face model folder with config.json",
            seen=f"{path} without it",
            todo="Give the folder of the target model that the states were captured from.",
        )
    outer: dict[str, Any] = json.loads(file.read_text())
    config: dict[str, Any] = outer.get("text_config") or outer
    needed = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "intermediate_size")
    missing = [name for name in needed if name not in config]
    if missing:
        raise InvalidInput(
            expected=f"{', '.join(needed)} in {file}",
            seen=f"no {', '.join(missing)}",
            todo="Only decoder models with these fields can have an EAGLE-3 drafter.",
        )
    heads = int(config["num_attention_heads"])
    eos = config.get("eos_token_id", outer.get("eos_token_id"))
    return TargetFacts(
        path=path,
        hidden=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        vocab=int(config["vocab_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        intermediate=int(config["intermediate_size"]),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=read_rope(config),
        max_positions=int(config.get("max_position_embeddings", 4096)),
        hidden_act=str(config.get("hidden_act", "silu")),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or outer.get("dtype") or "bfloat16"),
        bos_token_id=config.get("bos_token_id", outer.get("bos_token_id")),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
    )


def forced_token_ids(path: Path, facts: TargetFacts) -> tuple[int, ...]:
    """Tokens that the draft vocabulary must hold: bos, eos, and the special tokens that the chat template
    writes.

    Without eos in it a drafter can never end an answer; none of the public trainers forces it.
    """
    forced = {*facts.eos_token_ids, *([] if facts.bos_token_id is None else [facts.bos_token_id])}
    tokenizer_file = path / "tokenizer.json"
    if tokenizer_file.is_file():
        template_file = path / "chat_template.jinja"
        config_file = path / "tokenizer_config.json"
        template = template_file.read_text() if template_file.is_file() else ""
        if not template and config_file.is_file():
            template = json.dumps(json.loads(config_file.read_text()).get("chat_template") or "")
        added = json.loads(tokenizer_file.read_text()).get("added_tokens", [])
        forced |= {
            int(token["id"]) for token in added if token.get("special") and token["content"] in template
        }
    return tuple(sorted(token for token in forced if 0 <= token < facts.vocab))


@dataclass(frozen=True)
class TargetWeights:
    """The frozen tensors: ``embedding`` [V, H], ``norm`` [H] (final), ``lm_head`` [V, H] (= embedding when
    tied).
    """

    embedding: torch.Tensor
    norm: torch.Tensor
    lm_head: torch.Tensor


def read_target_weights(path: Path, *, dtype: torch.dtype, device: str) -> TargetWeights:
    """The three tensors from the folder's safetensors, whatever prefix the architecture gives them.

    Raises InvalidInput when the embedding or the final norm cannot be found.
    """
    from safetensors import safe_open

    where = _tensor_files(path)
    embedding_name = _only(
        path, [name for name in where if name.endswith("embed_tokens.weight")], "embed_tokens.weight"
    )
    norm_name = embedding_name.removesuffix("embed_tokens.weight") + "norm.weight"
    _only(path, [name for name in where if name == norm_name], norm_name)
    head_names = [name for name in where if name.endswith("lm_head.weight")]
    head_name = head_names[0] if head_names else embedding_name

    def read(name: str) -> torch.Tensor:
        with safe_open(where[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor.to(device=device, dtype=dtype)

    embedding = read(embedding_name)
    lm_head = embedding if head_name == embedding_name else read(head_name)
    return TargetWeights(embedding=embedding, norm=read(norm_name), lm_head=lm_head)


def _tensor_files(path: Path) -> dict[str, Path]:
    from safetensors import safe_open

    index = path / "model.safetensors.index.json"
    if index.is_file():
        return {name: path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    found: dict[str, Path] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found.update(dict.fromkeys(tensors.keys(), file))
    return found


def _only(path: Path, names: list[str], wanted: str) -> str:
    if len(names) == 1:
        return names[0]
    raise InvalidInput(
        expected=f"one tensor named ...{wanted} in {path}",
        seen=", ".join(names) or "none",
        todo="Give the folder of a text decoder model in safetensors.",
    )
