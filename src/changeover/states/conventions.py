"""The layer numbers that engines and other tools write for the same tensor.

Inside Changeover there is one number: boundary b, the residual stream after b decoder layers (0 = embeddings,
L = output of the last layer, before the final norm). What others write for it was read in their sources:

- vLLM (``eagle_aux_hidden_state_layer_ids``, ``extract_hidden_states``) and speculators: b
- SpecForge, TorchSpec, AngelSlim, Model-Optimizer: b - 1 ("output of layer")
- Hugging Face ``outputs.hidden_states``: index b, where index L is taken after the final norm
- SGLang's draft ``config.json``: b - 1 for most targets; for the DeepSeek-V2 family it depends on the version
  and on the first id (sglang pull request 25454), for gpt-oss on the version and the largest id
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise

from changeover.engines.versions import parsed
from changeover.machine.errors import InvalidInput

# Targets whose set_eagle3_layers_to_capture adds 1 only where the first id is 1, from SGLang 0.5.13 on.
_FIRST_ID_RULE_FAMILY = frozenset(
    {"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite"}
)
_FIRST_ID_RULE_SINCE = (0, 5, 13)
# gpt-oss: up to 0.5.12 always id + 1; read in 0.5.18: ids as they are where the largest is L.
_GPT_OSS_OLD_UNTIL = (0, 5, 12)
_GPT_OSS_NEW_SINCE = (0, 5, 18)


class Convention(StrEnum):
    """Who writes the number."""

    VLLM = "vllm"
    SPECULATORS = "speculators"
    SPECFORGE = "specforge"
    TORCHSPEC = "torchspec"
    ANGELSLIM = "angelslim"
    MODEL_OPTIMIZER = "model-optimizer"
    HUGGING_FACE = "hugging-face"


_ADDED_TO_BOUNDARY = {
    Convention.VLLM: 0,
    Convention.SPECULATORS: 0,
    Convention.HUGGING_FACE: 0,
    Convention.SPECFORGE: -1,
    Convention.TORCHSPEC: -1,
    Convention.ANGELSLIM: -1,
    Convention.MODEL_OPTIMIZER: -1,
}


def default_boundaries(layers: int) -> tuple[int, int, int]:
    """EAGLE-3's own choice (eagle/model/modeling_llama_kv.py): 2, L // 2, L - 3.

    Raises InvalidInput for a model of fewer than 7 layers, where these are not three different boundaries.
    """
    boundaries = (2, layers // 2, layers - 3)
    if not boundaries[0] < boundaries[1] < boundaries[2]:
        raise InvalidInput(
            expected="a model of 7 layers or more for the default boundaries 2, L // 2, L - 3",
            seen=f"{layers} layers",
            todo="Name the boundaries yourself.",
        )
    return boundaries


def check_boundaries(boundaries: Sequence[int], layers: int) -> tuple[int, ...]:
    """``boundaries`` as they are. Raises InvalidInput unless they rise and lie within 0 to ``layers``."""
    rising = all(a < b for a, b in pairwise(boundaries))
    if not boundaries or not rising or boundaries[0] < 0 or boundaries[-1] > layers:
        raise InvalidInput(
            expected=f"rising boundaries from 0 (embeddings) to {layers} (last layer)",
            seen=str(list(boundaries)),
            todo="Boundary b is the residual stream after b decoder layers.",
        )
    return tuple(boundaries)


def to_ids(convention: Convention, boundaries: Sequence[int], layers: int) -> list[int]:
    """The layer ids that ``convention`` writes for ``boundaries``.

    Raises InvalidInput for boundary 0 where the convention counts layer outputs, since it has no number for
    it.
    """
    ids = [b + _ADDED_TO_BOUNDARY[convention] for b in check_boundaries(boundaries, layers)]
    if ids[0] < 0:
        raise InvalidInput(
            expected=f"boundaries of 1 or more for {convention.value}, which numbers the outputs of layers",
            seen=str(list(boundaries)),
            todo="Leave the embeddings (boundary 0) out.",
        )
    return ids


def from_ids(convention: Convention, ids: Sequence[int], layers: int) -> tuple[int, ...]:
    """The boundaries that ``convention`` means by ``ids``."""
    return check_boundaries([i - _ADDED_TO_BOUNDARY[convention] for i in ids], layers)


def to_sglang_config(
    boundaries: Sequence[int], layers: int, model_type: str, version: str | None
) -> list[int]:
    """``eagle_config.eagle_aux_hidden_state_layer_ids`` such that SGLang captures ``boundaries``.

    ``model_type`` is the target's (``config.json``, the text part); ``version`` is SGLang's, None when it is
    not known which one will read the file. Raises InvalidInput where the ids would be read differently by
    different versions, or cannot say these boundaries at all.
    """
    checked = check_boundaries(boundaries, layers)
    if checked[0] == 0:
        raise InvalidInput(
            expected="boundaries of 1 or more for SGLang",
            seen=str(list(checked)),
            todo="Leave boundary 0 out.",
        )
    shifted = [b - 1 for b in checked]
    if model_type not in _FIRST_ID_RULE_FAMILY or shifted[0] == 1:
        return shifted
    if version is None:
        raise InvalidInput(
            expected=f"an SGLang version for a {model_type} target, or boundaries that start with 2",
            seen=f"boundaries {list(checked)} and no version",
            todo="Pin the version: since 0.5.13, ids that do not start with 1 are read as boundaries.",
        )
    if _parse(version) < _FIRST_ID_RULE_SINCE:
        return shifted
    if checked[0] == 1:
        raise InvalidInput(
            expected=f"a first boundary other than 1 for a {model_type} target on SGLang {version}",
            seen=str(list(checked)),
            todo="Ids that start with 1 are read as boundaries that start with 2.",
        )
    return list(checked)


def from_sglang_config(
    ids: Sequence[int], layers: int, model_type: str, version: str | None
) -> tuple[int, ...]:
    """The boundaries that SGLang captures for ``ids``; the inverse of to_sglang_config.

    Raises InvalidInput where that depends on a version that was not given (or was not read).
    """
    shifted = [i + 1 for i in ids]
    if model_type in _FIRST_ID_RULE_FAMILY and list(ids)[:1] != [1]:
        if version is None:
            raise _ambiguous(ids, model_type, "the version")
        meant = list(ids) if _parse(version) >= _FIRST_ID_RULE_SINCE else shifted
        return check_boundaries(meant, layers)
    if model_type == "gpt_oss" and max(ids, default=0) == layers:
        if version is None or _GPT_OSS_OLD_UNTIL < _parse(version) < _GPT_OSS_NEW_SINCE:
            raise _ambiguous(ids, model_type, "a version up to 0.5.12 or from 0.5.18 on")
        meant = list(ids) if _parse(version) >= _GPT_OSS_NEW_SINCE else shifted
        return check_boundaries(meant, layers)
    return check_boundaries(shifted, layers)


def _ambiguous(ids: Sequence[int], model_type: str, what: str) -> InvalidInput:
    return InvalidInput(
        expected=f"{what} of SGLang that reads these ids",
        seen=f"ids {list(ids)} for a {model_type} target",
        todo="SGLang versions read them as different layers; name the version, or test the drafter at both.",
    )


def _parse(version: str) -> tuple[int, int, int]:
    numbers = parsed(version)[:3]
    if len(numbers) < 3:
        raise InvalidInput(
            expected="an SGLang version such as 0.5.13", seen=repr(version), todo="Give three numbers."
        )
    major, minor, patch = numbers
    return (major, minor, patch)
