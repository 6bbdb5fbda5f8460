"""The served model: a Hugging Face causal LM run over packed segments, with the hidden states that are asked
for.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from changeover.engines.embedded.packed import (
    ATTENTION_NAME,
    PackedBatch,
    SequenceCache,
    commit,
    pack,
    packed_attention,
)
from changeover.engines.embedded.packed import Segment as Segment
from changeover.machine.errors import InvalidInput, NotSupported

log = logging.getLogger("changeover.embedded")


@dataclass(frozen=True)
class TargetOutput:
    """What one pass gives. ``rows`` are those of the packed batch.

    ``logits`` ``[len(logit_rows), vocab]``; ``boundaries[b]`` ``[rows, hidden]``: the residual stream after
    ``b`` layers; ``last`` ``[rows, hidden]``: the last layer's output after the final norm (None unless asked
    for).
    """

    batch: PackedBatch
    logits: torch.Tensor
    boundaries: dict[int, torch.Tensor]
    last: torch.Tensor | None


class TargetModel:
    """A causal LM with the packed attention function, its geometry, and hooks at the wanted boundaries."""

    def __init__(self, model: Any, *, eos_token_ids: frozenset[int]) -> None:
        config = model.config.get_text_config()
        _refuse_unknown_attention(config)
        self.model = model
        self.config = config
        self.layers: int = config.num_hidden_layers
        self.hidden: int = config.hidden_size
        self.vocab: int = config.vocab_size
        self.context_tokens: int = config.max_position_embeddings
        self.eos_token_ids = eos_token_ids
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._head_dim: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self._seen: dict[int, torch.Tensor] = {}
        self._last: torch.Tensor | None = None
        self._want_last = False
        model.base_model.register_forward_hook(self._keep_last)

    def watch_boundaries(self, boundaries: Sequence[int]) -> None:
        """Keep the residual stream at these boundaries (0 = embeddings, L = before the final norm) in every
        pass.
        """
        for boundary in boundaries:
            if not 0 <= boundary <= self.layers:
                raise InvalidInput(
                    expected=f"boundaries from 0 to {self.layers} (the model has {self.layers} layers)",
                    seen=str(boundary),
                    todo="Boundary b is the residual stream after b layers; choose others.",
                )
        layers = self.model.base_model.layers
        for boundary in sorted(set(boundaries)):
            if boundary < self.layers:
                layers[boundary].register_forward_pre_hook(self._keep_input(boundary), with_kwargs=True)
            else:
                layers[self.layers - 1].register_forward_hook(self._keep_output(boundary))

    def new_cache(self) -> SequenceCache:
        return SequenceCache(
            layers=self.layers,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(
        self, segments: Sequence[Segment], logit_rows: Sequence[int], *, want_last: bool
    ) -> TargetOutput:
        """Run all segments in one pass; logits only for ``logit_rows`` (indices into the packed rows)."""
        batch = pack(segments, self.device)
        self._seen, self._last, self._want_last = {}, None, want_last
        result = self.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=torch.tensor(logit_rows, dtype=torch.int64, device=self.device),
            packed_batch=batch,
        )
        commit(batch)
        return TargetOutput(
            batch=batch, logits=result.logits[0].float(), boundaries=self._seen, last=self._last
        )

    def _keep_input(self, boundary: int) -> Callable[..., None]:
        def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._seen[boundary] = (args[0] if args else kwargs["hidden_states"])[0]

        return keep

    def _keep_output(self, boundary: int) -> Callable[..., None]:
        def keep(_module: Any, _args: Any, output: Any) -> None:
            self._seen[boundary] = (output[0] if isinstance(output, tuple) else output)[0]

        return keep

    def _keep_last(self, _module: Any, _args: Any, output: Any) -> None:
        if self._want_last:
            self._last = output.last_hidden_state[0]


def default_boundaries(layers: int) -> tuple[int, int, int]:
    """EAGLE-3's usual three: 2, L//2, L-3 (Li et al. 2025; vLLM and SGLang take the same)."""
    return (2, layers // 2, layers - 3)


def load_target(path: Path, *, device: str, dtype: str) -> TargetModel:
    """Read a Hugging Face folder. ``device`` "auto" is a GPU where there is one; ``dtype`` "auto" is float32
    on a CPU and bfloat16 on a GPU.

    float32 on CPUs: without AMX or AVX512-BF16 it is the faster one, and speculation is then lossless token
    for token.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch_dtype = _torch_dtype(dtype, device)
    log.info("loading weights from %s as %s on %s", path, torch_dtype, device)
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch_dtype, attn_implementation=ATTENTION_NAME, local_files_only=True
    )
    model.requires_grad_(False).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    log.info("loaded %.1f M parameters", parameters / 1e6)
    return TargetModel(model, eos_token_ids=_eos_token_ids(path, model))


def _torch_dtype(name: str, device: str) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _eos_token_ids(path: Path, model: Any) -> frozenset[int]:
    """All ids that end an answer: generation_config.json where there is one, else config.json, as HF generate
    does.
    """
    generation = path / "generation_config.json"
    value = None
    if generation.is_file():
        value = json.loads(generation.read_text()).get("eos_token_id")
    if value is None:
        value = model.config.get_text_config().eos_token_id
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)


def _refuse_unknown_attention(config: Any) -> None:
    """Attention variants that the packed function would silently compute wrongly."""
    for field, meaning in (
        ("attn_logit_softcapping", "soft-capped attention logits"),
        ("kv_lora_rank", "multi-head latent attention"),
        ("attention_chunk_size", "chunked attention"),
        ("linear_num_key_heads", "linear attention"),
    ):
        if getattr(config, field, None):
            raise NotSupported(
                expected="a decoder with plain or sliding-window attention",
                seen=f"{config.model_type} with {field} ({meaning})",
                todo="Serve this model with SGLang or vLLM.",
            )
