"""A drafter as a folder that SGLang, vLLM and the embedded server load, and back.

Both servers must read the same layers from one file, and they count differently: vLLM takes the top-level
``eagle_aux_hidden_state_layer_ids`` as boundaries, SGLang the nested ones in ``eagle_config`` as the layer
before, so both are written, each in its reader's count. RoPE is written in the spellings of transformers 4
and 5.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from changeover.drafter.checkpoint import newest_checkpoint
from changeover.drafter.model import Drafter, DrafterShape, shape_for_target
from changeover.drafter.target import TargetFacts, read_rope, read_target_facts
from changeover.drafter.vocabulary import DraftVocabulary, vocabulary_from_d2t
from changeover.machine.errors import InvalidInput

ARCHITECTURE = "LlamaForCausalLMEagle3"


def drafter_config(shape: DrafterShape, target: TargetFacts, dtype: str) -> dict[str, Any]:
    """config.json: what both servers need, and nothing that one of them would read otherwise."""
    rope = shape.rope
    scaling = None if rope.type == "default" else {"rope_type": rope.type, **rope.scaling}
    eos = list(target.eos_token_ids)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "target_hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": shape.vocab,
        "draft_vocab_size": shape.draft_vocab,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": rope.theta, "rope_type": rope.type, **rope.scaling},
        "max_position_embeddings": shape.max_positions,
        "hidden_act": shape.hidden_act,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": dtype,
        "dtype": dtype,
        "num_aux_hidden_states": len(shape.boundaries),
        "eagle_aux_hidden_state_layer_ids": list(shape.boundaries),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [boundary - 1 for boundary in shape.boundaries],
        },
    }


def export_drafter(
    out: Path,
    drafter: Drafter,
    vocabulary: DraftVocabulary,
    target: TargetFacts,
    *,
    provenance: Mapping[str, Any],
) -> Path:
    """Write ``out`` by rename, weights in the target's dtype; ``provenance`` goes to
    ``changeover-drafter.json``.
    """
    from safetensors.torch import save_file

    dtype = getattr(torch, target.dtype)
    weights = {name: tensor.detach().cpu() for name, tensor in drafter.named_parameters()}
    weights["fc.weight"] = weights["fc.weight"] / drafter.aux_scale.cpu()
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    weights["d2t"] = torch.from_numpy(vocabulary.d2t)
    weights["t2d"] = torch.from_numpy(vocabulary.t2d)
    draft = out.with_name(f".{out.name}.tmp")
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    config = drafter_config(drafter.shape, target, target.dtype)
    (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    facts = {"draft_vocabulary_sha256": vocabulary.sha256, **provenance}
    (draft / "changeover-drafter.json").write_text(
        json.dumps(facts, indent=2, sort_keys=True, allow_nan=False) + "\n"
    )
    if out.exists():
        shutil.rmtree(out)
    draft.rename(out)
    return out


def load_drafter(folder: Path, *, dtype: torch.dtype, device: str) -> tuple[Drafter, DraftVocabulary]:
    """Read an exported folder. Raises InvalidInput for another architecture, or weights missing, unknown or
    misshapen.
    """
    from safetensors.torch import load_file

    file = folder / "config.json"
    if not file.is_file():
        raise InvalidInput(
            expected="a drafter folder with config.json",
            seen=f"{folder} without it",
            todo="Give an exported drafter.",
        )
    config = json.loads(file.read_text())
    if config.get("architectures") != [ARCHITECTURE]:
        raise InvalidInput(
            expected=f"architectures [{ARCHITECTURE!r}]",
            seen=repr(config.get("architectures")),
            todo="Only Llama-type EAGLE-3 drafters are read here.",
        )
    tensors = load_file(folder / "model.safetensors")
    vocab = int(config["vocab_size"])
    d2t = tensors.pop("d2t").numpy().astype(np.int64) if "d2t" in tensors else np.zeros(vocab, dtype=np.int64)
    tensors.pop("t2d", None)
    vocabulary = vocabulary_from_d2t(d2t, vocab)
    shape = DrafterShape(
        hidden=int(config["hidden_size"]),
        intermediate=int(config["intermediate_size"]),
        heads=int(config["num_attention_heads"]),
        kv_heads=int(config["num_key_value_heads"]),
        head_dim=int(config["head_dim"]),
        rms_norm_eps=float(config["rms_norm_eps"]),
        rope=read_rope(config),
        max_positions=int(config["max_position_embeddings"]),
        hidden_act=str(config["hidden_act"]),
        vocab=vocab,
        draft_vocab=vocabulary.size,
        boundaries=_boundaries(config, folder),
    )
    drafter = Drafter(shape)
    tensors["aux_scale"] = torch.ones_like(drafter.aux_scale)
    try:
        drafter.load_state_dict({name: tensor.to(torch.float32) for name, tensor in tensors.items()})
    except RuntimeError as error:
        raise InvalidInput(
            expected=f"the weights of one {ARCHITECTURE} layer in {folder}",
            seen=str(error),
            todo="Export the drafter again; a server would skip what it does not know.",
        ) from error
    return drafter.to(device=device, dtype=dtype), vocabulary


def _boundaries(config: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    top = config.get("eagle_aux_hidden_state_layer_ids")
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if top is None and nested is None:
        raise InvalidInput(
            expected=f"eagle_aux_hidden_state_layer_ids in {folder}/config.json",
            seen="neither spelling",
            todo="Write the layers that the drafter was trained on; a server would guess them.",
        )
    from_nested = None if nested is None else [layer + 1 for layer in nested]
    if top is not None and from_nested is not None and list(top) != from_nested:
        raise InvalidInput(
            expected=f"both spellings to name the same boundaries in {folder}/config.json",
            seen=f"top level {top}, nested {nested} (one less than a boundary)",
            todo="Correct the one that does not match the training data.",
        )
    return tuple(int(boundary) for boundary in (top if top is not None else from_nested or []))


def export_checkpoint(training: Path, model: Path, out: Path) -> dict[str, Any]:
    """Export the newest checkpoint of ``training`` (a train job's folder) to ``out``.

    Raises InvalidInput when there is none, or it was trained for another target.
    """
    target = read_target_facts(model)
    checkpoint = newest_checkpoint(training / "checkpoints")
    if checkpoint is None:
        raise InvalidInput(
            expected=f"a checkpoint in {training}/checkpoints",
            seen="none",
            todo="Give the --out folder of 'changeover drafter train'.",
        )
    run = checkpoint.state["run"]
    if run["target"] != target_identity(target):
        raise InvalidInput(
            expected=f"the target that was trained for, {run['target']}",
            seen=f"{model}: {target_identity(target)}",
            todo="Give that model.",
        )
    vocabulary = vocabulary_from_d2t(checkpoint.model["d2t"].numpy(), target.vocab)
    drafter = Drafter(shape_for_target(target, vocabulary.size, tuple(run["boundaries"])))
    drafter.load_state_dict({name: tensor for name, tensor in checkpoint.model.items() if name != "d2t"})
    provenance = {"states": run["states"], "steps": checkpoint.step, "seed": run["seed"]}
    export_drafter(out, drafter, vocabulary, target, provenance=provenance)
    return {"drafter": str(out), "step": checkpoint.step}


def target_identity(target: TargetFacts) -> dict[str, int]:
    """What a checkpoint and a target must share for the one to be a drafter of the other."""
    return {"hidden": target.hidden, "layers": target.layers, "vocab": target.vocab}
