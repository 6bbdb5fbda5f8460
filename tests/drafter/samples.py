"""Tiny targets, drafters and samples: random, seeded, with the shapes of the real ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from changeover.drafter.model import Drafter, DrafterShape, initialise
from changeover.drafter.target import RopeFacts, TargetWeights
from changeover.drafter.vocabulary import DraftVocabulary
from changeover.states.store import Manifest, Sample, StatesWriter

HIDDEN, VOCAB, DRAFT_VOCAB, LAYERS = 32, 64, 40, 8
BOUNDARIES = (2, 4, 5)


def as_bf16(tensor: torch.Tensor) -> npt.NDArray[np.uint16]:
    return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def make_sample(rows: int, mask: list[int] | None = None, *, seed: int, vocab: int = VOCAB) -> Sample:
    """``rows`` rows; by default the first third is the prompt."""
    generator = torch.Generator().manual_seed(seed)
    loss_mask = np.array(
        mask if mask is not None else [0] * (rows // 3) + [1] * (rows - rows // 3), dtype=np.uint8
    )
    return Sample(
        id=f"sample-{seed}",
        input_ids=torch.randint(0, vocab, (rows,), generator=generator).numpy(),
        loss_mask=loss_mask,
        aux=as_bf16(torch.randn(rows, len(BOUNDARIES), HIDDEN, generator=generator) * 3),
        last=as_bf16(torch.randn(rows, HIDDEN, generator=generator)),
    )


def make_shape(rope: RopeFacts | None = None) -> DrafterShape:
    return DrafterShape(
        hidden=HIDDEN,
        intermediate=48,
        heads=4,
        kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope=rope or RopeFacts(theta=10_000.0),
        max_positions=512,
        hidden_act="silu",
        vocab=VOCAB,
        draft_vocab=DRAFT_VOCAB,
        boundaries=BOUNDARIES,
    )


def make_target(seed: int = 7) -> TargetWeights:
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    return TargetWeights(
        embedding=embedding,
        norm=torch.rand(HIDDEN, generator=generator) + 0.5,
        lm_head=torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3,
    )


def make_vocabulary(seed: int = 3) -> DraftVocabulary:
    rng = np.random.default_rng(seed)
    return DraftVocabulary(np.sort(rng.choice(VOCAB, DRAFT_VOCAB, replace=False)).astype(np.int64), VOCAB)


def make_drafter(target: TargetWeights, vocabulary: DraftVocabulary, *, seed: int = 5) -> Drafter:
    """Weights large enough that attention and steps matter to the loss."""
    drafter = Drafter(make_shape())
    initialise(drafter, target, vocabulary, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 2 and name != "lm_head.weight":
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)
        drafter.aux_scale.copy_(torch.rand(len(BOUNDARIES) * HIDDEN, generator=generator) * 4 + 1)
    return drafter


def write_target_folder(folder: Path, target: TargetWeights) -> Path:
    """A Hugging Face folder as far as the trainer reads one."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        "model.embed_tokens.weight": target.embedding,
        "model.norm.weight": target.norm,
        "lm_head.weight": target.lm_head,
    }
    save_file(weights, folder / "model.safetensors")
    return folder


def write_states(folder: Path, *, samples: int = 24, rows: int = 20, held_out: float = 0.2) -> Path:
    """A store with ``samples`` samples; every one follows the same successor rule, so that there is something to
    learn.
    """
    manifest = Manifest(
        hidden=HIDDEN, layers=LAYERS, vocab=VOCAB, boundaries=BOUNDARIES, held_out_fraction=held_out
    )
    writer = StatesWriter.create(folder, manifest)
    target = make_target()
    for seed in range(samples):
        length = rows + seed % 5
        first = seed % VOCAB
        ids = np.array([(first + 7 * row) % VOCAB for row in range(length)], dtype=np.int64)
        following = torch.from_numpy((ids + 7) % VOCAB)
        # the final state points at the token that follows; the captured ones at the token itself
        last = target.lm_head[following] / target.lm_head[following].norm(dim=-1, keepdim=True) * 30
        here = target.embedding[torch.from_numpy(ids)]
        mask = np.zeros(length, dtype=np.uint8)
        mask[5:] = 1
        aux = here[:, None].expand(-1, len(BOUNDARIES), -1)
        writer.add(Sample(f"sample-{seed}", ids, mask, as_bf16(aux.clone()), as_bf16(last)))
    writer.seal({"test": True})
    writer.close()
    return folder
