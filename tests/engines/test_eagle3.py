"""Reading an exported drafter: strictly, and the way SGLang and vLLM number layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from changeover.engines.embedded.eagle3 import load_drafter, read_facts
from changeover.engines.embedded.packed import Segment, commit, pack
from changeover.engines.embedded.target import TargetModel, load_target
from changeover.machine.errors import InvalidInput
from tests.engines.drafters import write_drafter


@pytest.fixture(scope="module")
def target(tiny_model_dir: Path) -> TargetModel:
    return load_target(tiny_model_dir, device="cpu", dtype="auto")


@pytest.fixture
def folder(tmp_path: Path, tiny_model_dir: Path) -> Path:
    return write_drafter(tmp_path / "drafter", tiny_model_dir)


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_top_level_ids_are_boundaries(folder: Path) -> None:
    change_config(folder, lambda config: config.pop("eagle_config"))
    assert read_facts(folder, target_layers=8)[0].boundaries == (2, 4, 5)


def test_nested_ids_are_one_less(folder: Path) -> None:
    change_config(folder, lambda config: config.pop("eagle_aux_hidden_state_layer_ids"))
    assert read_facts(folder, target_layers=8)[0].boundaries == (2, 4, 5)


def test_no_ids_mean_the_usual_three(folder: Path) -> None:
    change_config(
        folder, lambda config: (config.pop("eagle_aux_hidden_state_layer_ids"), config.pop("eagle_config"))
    )
    assert read_facts(folder, target_layers=30)[0].boundaries == (2, 15, 27)


def test_two_spellings_that_disagree_are_refused(folder: Path) -> None:
    change_config(folder, lambda config: config.update(eagle_aux_hidden_state_layer_ids=[1, 3, 4]))
    with pytest.raises(InvalidInput, match="one below"):
        read_facts(folder, target_layers=8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLMEagle3"),
        ({"num_hidden_layers": 2}, "one layer"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"norm_output": True}, "norm_output"),
    ],
)
def test_what_this_server_would_run_otherwise_is_refused(
    folder: Path, change: dict[str, Any], said: str
) -> None:
    change_config(folder, lambda config: config.update(change))
    with pytest.raises(InvalidInput, match=said):
        read_facts(folder, target_layers=8)


def test_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"config\.json"):
        read_facts(tmp_path, target_layers=8)


def test_an_unknown_weight_is_an_error(folder: Path, target: TargetModel) -> None:
    change_weights(folder, lambda weights: weights.update({"midlayer.extra.weight": torch.ones(2)}))
    with pytest.raises(InvalidInput, match=r"midlayer\.extra"):
        load_drafter(folder, target, draft_tokens=3)


def test_a_missing_weight_is_an_error(folder: Path, target: TargetModel) -> None:
    change_weights(folder, lambda weights: weights.pop("fc.weight"))
    with pytest.raises(InvalidInput, match=r"missing: \['fc\.weight'\]"):
        load_drafter(folder, target, draft_tokens=3)


def test_a_wrong_shape_is_an_error(folder: Path, target: TargetModel) -> None:
    change_weights(folder, lambda weights: weights.update({"lm_head.weight": torch.ones(3, 64)}))
    with pytest.raises(InvalidInput, match=r"lm_head\.weight \(3, 64\) instead of \(64, 64\)"):
        load_drafter(folder, target, draft_tokens=3)


def test_target_ids_in_place_of_offsets_are_noticed(folder: Path, target: TargetModel) -> None:
    change_weights(folder, lambda weights: weights.update({"d2t": torch.arange(64) + 400}))
    with pytest.raises(InvalidInput, match="offsets"):
        load_drafter(folder, target, draft_tokens=3)


def test_layers_0_is_a_synonym_of_midlayer(folder: Path, target: TargetModel) -> None:
    def rename(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if name.startswith("midlayer.")]:
            weights["layers.0." + name.removeprefix("midlayer.")] = weights.pop(name)

    change_weights(folder, rename)
    load_drafter(folder, target, draft_tokens=3)


def test_the_forward_pass_is_the_published_one(folder: Path, target: TargetModel) -> None:
    """Against the formula written out with plain tensors for one sequence."""
    weights = load_file(folder / "model.safetensors")
    drafter = load_drafter(folder, target, draft_tokens=3)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(9, 3 * 64, generator=generator)
    tokens = list(range(20, 29))
    batch = pack([Segment(tokens, drafter.new_state().cache)], torch.device("cpu"))
    state = drafter._run(batch, drafter.network.fc(features))
    commit(batch)

    def rms(values: torch.Tensor) -> torch.Tensor:
        return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-5)

    def rotate(values: torch.Tensor) -> torch.Tensor:  # [heads, T, 16]
        frequency = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
        angle = torch.outer(torch.arange(9.0), frequency).repeat(1, 2)
        half = torch.cat((-values[..., 8:], values[..., :8]), -1)
        return values * angle.cos() + half * angle.sin()

    def project(name: str, heads: int) -> torch.Tensor:
        return (joined @ weights[f"midlayer.self_attn.{name}.weight"].T).view(9, heads, 16).transpose(0, 1)

    def linear(values: torch.Tensor, name: str) -> torch.Tensor:
        return values @ weights[f"midlayer.mlp.{name}.weight"].T

    embedded = target.model.get_input_embeddings().weight[tokens]
    hidden = features @ weights["fc.weight"].T
    joined = torch.cat((rms(embedded), rms(hidden)), -1)
    query, key, value = rotate(project("q_proj", 4)), rotate(project("k_proj", 2)), project("v_proj", 2)
    key, value = key.repeat_interleave(2, 0), value.repeat_interleave(2, 0)
    scores = query @ key.transpose(1, 2) / 4 + torch.full((9, 9), float("-inf")).triu(1)
    attended = (scores.softmax(-1) @ value).transpose(0, 1).reshape(9, 64)
    after = hidden + attended @ weights["midlayer.self_attn.o_proj.weight"].T
    normed = rms(after)
    expected = after + linear(
        torch.nn.functional.silu(linear(normed, "gate_proj")) * linear(normed, "up_proj"), "down_proj"
    )
    torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        drafter.network.logits(state), rms(expected) @ weights["lm_head.weight"].T, rtol=1e-4, atol=1e-4
    )


def test_an_own_embedding_is_used_where_there_is_one(folder: Path, target: TargetModel) -> None:
    own = torch.randn(448, 64)
    change_weights(folder, lambda weights: weights.update({"embed_tokens.weight": own}))
    drafter = load_drafter(folder, target, draft_tokens=3)
    torch.testing.assert_close(drafter._embed(torch.tensor([3])), own[3:4])
