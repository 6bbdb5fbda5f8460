"""Where a target's tensors and its configuration are: a Hugging Face folder, read as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from changeover.machine.errors import InvalidInput


def files_by_tensor(model_path: Path) -> dict[str, Path]:
    """Tensor name -> file. Raises InvalidInput where the folder has neither weights nor their index."""
    from safetensors import safe_open

    index = model_path / "model.safetensors.index.json"
    if index.exists():
        return {name: model_path / Path(file).name for name, file in read_json(index)["weight_map"].items()}
    single = model_path / "model.safetensors"
    if not single.exists():
        raise InvalidInput(
            expected=f"model.safetensors (or its index) in {model_path}",
            seen="neither",
            todo="Give a model's folder.",
        )
    with safe_open(single, "np") as weights:
        return dict.fromkeys(weights.keys(), single)


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidInput(
            expected=f"JSON at {path}", seen=str(error), todo="Give a model's folder."
        ) from error
    if not isinstance(value, dict):
        raise InvalidInput(
            expected=f"an object in {path}", seen=type(value).__name__, todo="Restore the file."
        )
    return value
