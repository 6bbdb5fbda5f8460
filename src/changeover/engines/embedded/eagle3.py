"""An EAGLE-3 drafter (``LlamaForCausalLMEagle3``) as SGLang and vLLM read and run it, from its exported
folder.

Slot ``t`` takes the target's features at position ``t`` (the residual stream at three boundaries, through
``fc``) and the embedding of token ``t + 1``; it predicts token ``t + 2``. Further chain steps take the
drafter's own state before ``norm`` in place of the features. (Li et al. 2025, EAGLE-3; SGLang's
``llama_eagle3.py``, vLLM's ``llama_eagle3.py``.)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from changeover.engines.embedded.packed import (
    PackedBatch,
    Segment,
    SequenceCache,
    commit,
    pack,
    packed_attention,
)
from changeover.engines.embedded.sequence import Sequence as RequestSequence
from changeover.engines.embedded.target import TargetModel, TargetOutput
from changeover.machine.errors import InvalidInput

log = logging.getLogger("changeover.embedded")

ARCHITECTURE = "LlamaForCausalLMEagle3"
_LAYER_0 = SimpleNamespace(layer_idx=0)


@dataclass(frozen=True)
class DrafterFacts:
    """What config.json says, in boundaries (see docs/design.md, Words)."""

    boundaries: tuple[int, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    draft_vocab: int
    rms_norm_eps: float


def read_facts(folder: Path, *, target_layers: int) -> tuple[DrafterFacts, dict[str, Any]]:
    """Read and check config.json. Raises InvalidInput for anything that this server would run otherwise than
    trained.
    """
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise InvalidInput(
            expected=f"an exported EAGLE-3 folder with config.json at {folder}",
            seen="no such file",
            todo="Export one with `changeover drafter export`.",
        )
    config = json.loads(config_file.read_text())
    if config.get("architectures") != [ARCHITECTURE]:
        raise InvalidInput(
            expected=f"architectures: [{ARCHITECTURE!r}] in {config_file}",
            seen=repr(config.get("architectures")),
            todo="Only Llama-type EAGLE-3 drafters are served here.",
        )
    if config.get("num_hidden_layers", 1) != 1:
        raise InvalidInput(
            expected="a drafter of one layer",
            seen=f"{config['num_hidden_layers']} layers",
            todo="Use SGLang or vLLM.",
        )
    nested = config.get("eagle_config") or {}
    for name in ("norm_output", "norm_before_fc", "norm_before_residual", "fc_norm"):
        if config.get(name) or nested.get(name):
            raise InvalidInput(
                expected=f"a drafter without {name}",
                seen=f"{name}: true",
                todo="Use an engine that implements it.",
            )
    heads = config["num_attention_heads"]
    facts = DrafterFacts(
        boundaries=_boundaries(config, nested, target_layers),
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        draft_vocab=config.get("draft_vocab_size") or config["vocab_size"],
        rms_norm_eps=config["rms_norm_eps"],
    )
    return facts, config


def _boundaries(config: Mapping[str, Any], nested: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Top-level ids are boundaries (vLLM's spelling); nested ids are one less (SGLang's); absent means 2,
    L//2, L-3.
    """
    top = config.get("eagle_aux_hidden_state_layer_ids")
    inner = nested.get("eagle_aux_hidden_state_layer_ids")
    if top is not None and inner is not None and list(top) != [one + 1 for one in inner]:
        raise InvalidInput(
            expected="nested eagle_aux_hidden_state_layer_ids one below the top-level ones",
            seen=f"top {top}, nested {inner}",
            todo="Export the drafter again; the two spellings must name the same boundaries.",
        )
    if top is not None:
        return tuple(top)
    if inner is not None:
        return tuple(one + 1 for one in inner)
    return (2, layers // 2, layers - 3)


class Eagle3Network(nn.Module):
    """The drafter's weights, named as in the checkpoint, and its forward pass over packed slots."""

    midlayer: Any  # a tree of modules whose names are the checkpoint's
    norm: Any

    def __init__(self, facts: DrafterFacts, llama: Any, *, target_hidden: int) -> None:
        from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

        super().__init__()
        hidden, eps = facts.hidden, facts.rms_norm_eps
        self.facts = facts
        self.fc = nn.Linear(len(facts.boundaries) * target_hidden, hidden, bias=False)
        self.midlayer = nn.Module()
        self.midlayer.self_attn = nn.Module()
        for name, rows in (("q_proj", facts.heads), ("k_proj", facts.kv_heads), ("v_proj", facts.kv_heads)):
            setattr(self.midlayer.self_attn, name, nn.Linear(2 * hidden, rows * facts.head_dim, bias=False))
        self.midlayer.self_attn.o_proj = nn.Linear(facts.heads * facts.head_dim, hidden, bias=False)
        self.midlayer.mlp = LlamaMLP(llama)  # type: ignore[no-untyped-call]
        self.midlayer.hidden_norm = LlamaRMSNorm(hidden, eps)
        self.midlayer.input_layernorm = LlamaRMSNorm(hidden, eps)
        self.midlayer.post_attention_layernorm = LlamaRMSNorm(hidden, eps)
        self.norm = LlamaRMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, facts.draft_vocab, bias=False)

    def forward(
        self, embeddings: torch.Tensor, state: torch.Tensor, batch: PackedBatch, rotary: nn.Module
    ) -> torch.Tensor:
        """``embeddings`` and ``state`` are ``[rows, hidden]``; returns the state before ``norm``, same
        shape.
        """
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        facts, layer = self.facts, self.midlayer
        rows = embeddings.shape[0]
        joined = torch.cat((layer.input_layernorm(embeddings), layer.hidden_norm(state)), dim=-1)
        attention = layer.self_attn
        shape = (1, rows, -1, facts.head_dim)
        query = attention.q_proj(joined).view(shape).transpose(1, 2)
        key = attention.k_proj(joined).view(shape).transpose(1, 2)
        value = attention.v_proj(joined).view(shape).transpose(1, 2)
        cos, sin = rotary(joined, batch.position_ids)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        attended, _ = packed_attention(_LAYER_0, query, key, value, None, packed_batch=batch)
        state = state + attention.o_proj(attended.reshape(rows, -1))
        result: torch.Tensor = state + layer.mlp(layer.post_attention_layernorm(state))
        return result

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.norm(state))
        return logits


@dataclass
class DraftState:
    """A sequence's drafter side: its slots' keys and values, and the tokens drafted for the next verify
    step.
    """

    cache: SequenceCache
    drafted: list[int] = field(default_factory=list)


class Eagle3Drafter:
    """Drafts ``draft_tokens`` tokens a sequence, greedily, one chain, all sequences of a step together."""

    def __init__(
        self,
        network: Eagle3Network,
        *,
        rotary: nn.Module,
        to_target: torch.Tensor,
        embed: nn.Module,
        draft_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.network = network
        self.boundaries = network.facts.boundaries
        self.draft_tokens = draft_tokens
        self._rotary = rotary
        self._to_target = to_target
        self._embed = embed
        self._device = device
        self._dtype = dtype

    def new_state(self) -> DraftState:
        facts = self.network.facts
        cache = SequenceCache(
            layers=1, kv_heads=facts.kv_heads, head_dim=facts.head_dim, dtype=self._dtype, device=self._device
        )
        return DraftState(cache)

    @torch.inference_mode()
    def extend_and_draft(self, going: Sequence[tuple[RequestSequence, slice]], output: TargetOutput) -> None:
        """Bring each sequence's slots up to its committed tokens with the target's features, then draft.

        ``going`` names the sequences and their rows in the target's pass. A row beyond ``cache.length``
        belongs to a rejected draft. The last committed slot's token is the newest one, which the target has
        not been fed yet.
        """
        segments, features, drafting = [], [], []
        for sequence, rows in going:
            assert sequence.draft is not None and sequence.cache is not None
            first = sequence.draft.cache.length
            count = sequence.cache.length - first
            sequence.draft.drafted = []
            segments.append(Segment(sequence.token_ids[first + 1 : first + 1 + count], sequence.draft.cache))
            kept = slice(rows.start, rows.start + count)
            features.append(torch.cat([output.boundaries[b][kept] for b in self.boundaries], dim=-1))
            # While a prompt is still being fed there is nothing to draft from.
            drafting.append(sequence.generated > 0)
        if not segments:
            return
        batch = pack(segments, self._device)
        state = self._run(batch, self.network.fc(torch.cat(features)))
        commit(batch)
        last_rows = [batch.starts[i + 1] - 1 for i, one in enumerate(drafting) if one]
        drafts = [sequence.draft for (sequence, _), one in zip(going, drafting, strict=True) if one]
        self._chain([draft for draft in drafts if draft is not None], state[last_rows])

    def _chain(self, drafts: list[DraftState], state: torch.Tensor) -> None:
        """The first token from the target's features, each further one from the drafter's own state."""
        if not drafts:
            return
        committed = [draft.cache.length for draft in drafts]
        for step in range(self.draft_tokens):
            if step > 0:
                batch = pack([Segment(draft.drafted[-1:], draft.cache) for draft in drafts], self._device)
                state = self._run(batch, state)
                commit(batch)
            best = self.network.logits(state).argmax(dim=-1)
            for draft, token_id in zip(drafts, self._to_target[best].tolist(), strict=True):
                draft.drafted.append(token_id)
        for draft, length in zip(drafts, committed, strict=True):
            draft.cache.length = length

    def _run(self, batch: PackedBatch, state: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.network(self._embed(batch.input_ids[0]), state, batch, self._rotary)
        return result


def load_drafter(folder: Path, target: TargetModel, *, draft_tokens: int) -> Eagle3Drafter:
    """Read the exported folder strictly: every weight known, every weight there, every shape right."""
    from safetensors.torch import load_file
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    facts, config = read_facts(folder, target_layers=target.layers)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(load_file(file))
    weights = {_current_name(name): tensor for name, tensor in weights.items()}
    offsets = weights.pop("d2t", None)
    weights.pop("t2d", None)  # the servers derive it from d2t
    embed: nn.Module = target.model.get_input_embeddings()
    own_embedding = weights.pop("embed_tokens.weight", None)
    if own_embedding is not None:
        rows, width = own_embedding.shape
        embed = nn.Embedding(rows, width, device="meta")
        embed.weight = nn.Parameter(own_embedding.to(target.device, target.dtype), requires_grad=False)
    llama = LlamaConfig(**{k: v for k, v in config.items() if k not in ("architectures", "eagle_config")})
    with torch.device("meta"):
        network = Eagle3Network(facts, llama, target_hidden=target.hidden)
    _check_weights(weights, dict(network.state_dict()), folder)
    converted = {name: tensor.to(target.device, target.dtype) for name, tensor in weights.items()}
    network.load_state_dict(converted, assign=True)
    network.eval().requires_grad_(False)
    to_target = _to_target(offsets, facts.draft_vocab, target.vocab)
    log.info(
        "drafter from %s: boundaries %s, draft vocabulary %d", folder, facts.boundaries, facts.draft_vocab
    )
    target.watch_boundaries(facts.boundaries)
    return Eagle3Drafter(
        network,
        rotary=LlamaRotaryEmbedding(llama).to(target.device),
        to_target=to_target.to(target.device),
        embed=embed,
        draft_tokens=draft_tokens,
        device=target.device,
        dtype=target.dtype,
    )


def _current_name(name: str) -> str:
    """Both servers accept ``layers.0.`` for ``midlayer.``."""
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _check_weights(
    weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], folder: Path
) -> None:
    todo = "Export the drafter again; a server that skipped this would draft noise."
    unknown, missing = sorted(weights.keys() - expected.keys()), sorted(expected.keys() - weights.keys())
    if unknown or missing:
        raise InvalidInput(
            expected=f"exactly the weights of {ARCHITECTURE} in {folder}",
            seen=f"unknown: {unknown or 'none'}; missing: {missing or 'none'}",
            todo=todo,
        )
    wrong = [
        f"{name} {tuple(weights[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if weights[name].shape != tensor.shape
    ]
    if wrong:
        raise InvalidInput(
            expected=f"the shapes that {folder}/config.json implies", seen="; ".join(wrong), todo=todo
        )


def _to_target(offsets: torch.Tensor | None, draft_vocab: int, target_vocab: int) -> torch.Tensor:
    """``d2t`` holds offsets: the target's id of draft id ``i`` is ``i + d2t[i]``. Without it the ids are the
    same.
    """
    ids = torch.arange(draft_vocab)
    if offsets is not None:
        if offsets.shape != ids.shape:
            raise InvalidInput(
                expected=f"d2t of {draft_vocab} offsets", seen=str(tuple(offsets.shape)), todo="Export again."
            )
        ids = ids + offsets.to(torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= target_vocab:
        raise InvalidInput(
            expected=f"draft ids that map into the target's vocabulary of {target_vocab}",
            seen=f"ids from {int(ids.min())} to {int(ids.max())}",
            todo="d2t must hold offsets (target id - draft id), not target ids.",
        )
    return ids
