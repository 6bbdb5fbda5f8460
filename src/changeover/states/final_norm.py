"""The target's final norm, applied here where an engine gives the last layer's output before it.

RMSNorm (Zhang and Sennrich, 2019) as the Llama, Qwen and DeepSeek families have it: x / sqrt(mean(x²) + eps) * weight,
computed in float32. Families with another final norm are refused: a drafter trained on such states is never accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from changeover.machine.errors import InvalidInput
from changeover.states.target_files import files_by_tensor, read_json
from changeover.states.tensors import TensorFile, TensorFileInvalid

F32 = npt.NDArray[np.float32]
_NAME = "model.norm.weight"
RMS_FAMILIES = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2"}
)


@dataclass(frozen=True)
class FinalNorm:
    """``weight`` float32 [H]."""

    weight: F32
    eps: float

    def apply(self, states: F32) -> F32:
        """float32 [T, H] before the norm -> float32 [T, H] after it."""
        scale = 1.0 / np.sqrt(np.mean(np.square(states), axis=-1, keepdims=True) + np.float32(self.eps))
        normed: F32 = states * scale * self.weight
        return normed


def read_final_norm(model_path: Path) -> FinalNorm:
    """From a Hugging Face folder. Raises InvalidInput where the family is not known to end in a plain RMSNorm."""
    config = read_json(model_path / "config.json")
    text: dict[str, Any] = config.get("text_config", config)
    if text.get("model_type") not in RMS_FAMILIES:
        raise InvalidInput(
            expected=f"a target whose final norm is known ({', '.join(sorted(RMS_FAMILIES))})",
            seen=f"model_type {text.get('model_type')!r}",
            todo="Capture with the embedded engine, which gives the states after the norm.",
        )
    files = files_by_tensor(model_path)
    name = next((one for one in sorted(files) if one == _NAME or one.endswith("." + _NAME)), None)
    if name is None:
        raise InvalidInput(
            expected=f"{_NAME} in the weights of {model_path}",
            seen=f"{len(files)} tensors without it",
            todo="Give a Hugging Face folder with its weights.",
        )
    try:
        return FinalNorm(TensorFile(files[name]).read(name), float(text.get("rms_norm_eps", 1e-6)))
    except TensorFileInvalid as error:
        raise InvalidInput(
            expected=f"the weights of {model_path}", seen=str(error), todo="Download the model again."
        ) from error
