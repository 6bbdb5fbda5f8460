"""An exported folder: read back it is the same drafter, and a server's own reading of it computes the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from changeover.drafter.data import bf16_tensor
from changeover.drafter.export import export_drafter, load_drafter
from changeover.drafter.model import Drafter, initialise, inverse_frequencies, shape_for_target
from changeover.drafter.target import RopeFacts, read_rope, read_target_facts, read_target_weights
from changeover.drafter.vocabulary import DraftVocabulary, choose_vocabulary
from changeover.machine.errors import InvalidInput
from tests.drafter.reference import document_hidden
from tests.drafter.samples import (
    HIDDEN,
    make_drafter,
    make_sample,
    make_target,
    make_vocabulary,
    write_target_folder,
)


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Path, Drafter, DraftVocabulary]:
    target, vocabulary = make_target(), make_vocabulary()
    drafter = make_drafter(target, vocabulary)
    facts = read_target_facts(write_target_folder(tmp_path / "target", target))
    out = export_drafter(tmp_path / "drafter", drafter, vocabulary, facts, provenance={"steps": 1})
    return out, drafter, vocabulary


def test_the_folder_gives_the_same_logits(exported: tuple[Path, Drafter, DraftVocabulary]) -> None:
    out, drafter, vocabulary = exported
    again, again_vocabulary = load_drafter(out, dtype=torch.float32, device="cpu")
    sample, target = make_sample(15, seed=1), make_target()
    arguments = (bf16_tensor(sample.aux).float(), torch.from_numpy(sample.input_ids), 3)
    for before, after in zip(
        document_hidden(drafter, target.embedding, *arguments),
        document_hidden(again, target.embedding, *arguments),
        strict=True,
    ):
        logits, expected = again.lm_head(again.norm(after)), drafter.lm_head(drafter.norm(before))
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert again_vocabulary.sha256 == vocabulary.sha256
    assert again.shape == drafter.shape


def test_what_the_servers_read(exported: tuple[Path, Drafter, DraftVocabulary]) -> None:
    out, drafter, vocabulary = exported
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # vLLM: boundaries
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # SGLang: the layer before
    assert config["eagle_config"]["use_aux_hidden_state"] is True
    assert (config["vocab_size"], config["draft_vocab_size"], config["num_hidden_layers"]) == (64, 40, 1)
    assert config["rope_theta"] == 10_000.0 and config["rope_parameters"]["rope_theta"] == 10_000.0
    assert (config["head_dim"], config["num_key_value_heads"], config["tie_word_embeddings"]) == (8, 2, False)
    tensors = load_file(out / "model.safetensors")
    trained = {name for name, _ in drafter.named_parameters()}
    assert tensors.keys() == trained | {"d2t", "t2d"}
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert (tensors["d2t"] + torch.arange(40)).tolist() == vocabulary.token_ids.tolist()
    assert tensors["fc.weight"].shape == (HIDDEN, 3 * HIDDEN)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 2 * HIDDEN)


def test_a_renamed_weight_is_refused(exported: tuple[Path, Drafter, DraftVocabulary]) -> None:
    out, *_ = exported
    tensors = load_file(out / "model.safetensors")
    tensors["midlayer.norm.weight"] = tensors.pop("norm.weight")
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"midlayer\.norm\.weight"):
        load_drafter(out, dtype=torch.float32, device="cpu")


def test_layer_ids_that_disagree_are_refused(exported: tuple[Path, Drafter, DraftVocabulary]) -> None:
    out, *_ = exported
    config = json.loads((out / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match="same boundaries"):
        load_drafter(out, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_theta": 5e5}, RopeFacts(5e5)),
        ({"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}, RopeFacts(1e5)),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeFacts(1e4, "linear", {"factor": 2.0}),
        ),
        ({"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 64.0}}, RopeFacts(1e6)),
    ],
)
def test_rope_in_both_spellings(config: dict[str, object], expected: RopeFacts) -> None:
    assert read_rope(config) == expected


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ],
)
def test_scaled_rope_equals_transformers(scaling: dict[str, object]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": 1e4, **scaling},
    )
    expected, _ = ROPE_INIT_FUNCTIONS[str(scaling["rope_type"])](config, torch.device("cpu"))
    ours = inverse_frequencies(read_rope({"rope_parameters": {"rope_theta": 1e4, **scaling}}), 64)
    torch.testing.assert_close(ours, expected)


def test_the_embedded_server_computes_the_same(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Its own code, its own reading of the folder: states of a whole document, then of a chain of three."""
    from changeover.engines.embedded.eagle3 import load_drafter as load_served
    from changeover.engines.embedded.packed import Segment, commit, pack
    from changeover.engines.embedded.target import load_target

    facts = read_target_facts(tiny_model_dir)
    weights = read_target_weights(tiny_model_dir, dtype=torch.float32, device="cpu")
    boundaries = (2, 4, 5)
    vocabulary = choose_vocabulary(torch.arange(facts.vocab).numpy(), 100, [0, 1])
    drafter = Drafter(shape_for_target(facts, 100, boundaries))
    initialise(drafter, weights, vocabulary, 0)
    with torch.no_grad():
        for parameter in drafter.midlayer.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    facts = dataclasses.replace(facts, dtype="float32")
    out = export_drafter(tmp_path / "drafter", drafter, vocabulary, facts, provenance={})
    served = load_served(out, load_target(tiny_model_dir, device="cpu", dtype="float32"), draft_tokens=3)

    rows, following = 12, [7, 8]
    ids = torch.randint(0, facts.vocab, (rows,), generator=torch.Generator().manual_seed(1))
    aux = torch.randn(rows, 3, facts.hidden, generator=torch.Generator().manual_seed(2))
    ours = document_hidden(drafter, weights.embedding, aux, ids, 3, torch.tensor([*following, 0]))
    state = served.new_state()
    network = served.network
    with torch.inference_mode():
        batch = pack([Segment(ids[1:].tolist(), state.cache)], torch.device("cpu"))
        hidden = served._run(batch, network.fc(aux[:-1].flatten(1)))
        commit(batch)
        torch.testing.assert_close(hidden, ours[0], rtol=1e-4, atol=1e-4)
        for step, token in enumerate(following, start=1):
            batch = pack([Segment([token], state.cache)], torch.device("cpu"))
            hidden = served._run(batch, hidden[-1:])
            commit(batch)
            torch.testing.assert_close(hidden[-1], ours[step][-1], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                network.logits(hidden[-1]),
                drafter.lm_head(drafter.norm(ours[step][-1])),
                rtol=1e-4,
                atol=1e-3,
            )
