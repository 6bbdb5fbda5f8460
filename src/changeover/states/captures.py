"""What a server captured for one request, read and checked against what it answered.

The file is the server's: it is data, and nothing in it is believed before it is checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from changeover.states.layout import I64, U16, Sample, is_finite
from changeover.states.manifest import Manifest
from changeover.states.tensors import TensorFile, TensorFileInvalid

_MAX_HEADER_BYTES = 1 << 20


class CaptureInvalid(Exception):  # noqa: N818 - becomes the reason of a failed sample
    """The captured file or the answer is not what was asked for; says what is wrong."""


@dataclass(frozen=True)
class Answer:
    """What the server said beside the file: ids of the answer, and what it claims to have captured."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    output_token_ids: tuple[int, ...]
    rows: int
    boundaries: tuple[int, ...]
    last_norm: str
    bytes: int
    path: str


@dataclass(frozen=True)
class Captured:
    """The tensors of a capture file: input_ids int64 [T], aux uint16 [T, n, H], last uint16 [T, H] (bf16
    bits).
    """

    input_ids: I64
    aux: U16
    last: U16


def parse_answer(body: object) -> Answer:
    """The answer in a chat completion's body. Raises CaptureInvalid where a field is absent or contradicts
    another.
    """
    try:
        if not isinstance(body, dict):
            raise TypeError("the body is not an object")
        capture, usage, choice = body["capture"], body["usage"], body["choices"][0]
        answer = Answer(
            text=str(choice["message"]["content"] or ""),
            finish_reason=choice.get("finish_reason"),
            prompt_tokens=int(capture["prompt_tokens"]),
            output_token_ids=tuple(int(i) for i in capture["output_token_ids"]),
            rows=int(capture["tokens"]),
            boundaries=tuple(int(b) for b in capture["boundaries"]),
            last_norm=str(capture["last_norm"]),
            bytes=int(capture["bytes"]),
            path=str(capture["path"]),
        )
        used = (int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CaptureInvalid(
            f"the answer lacks a field of a captured one: {type(error).__name__}: {error}"
        ) from error
    if used != (answer.prompt_tokens, len(answer.output_token_ids)):
        raise CaptureInvalid(
            f"usage says {used[0]} + {used[1]} tokens, "
            f"capture {answer.prompt_tokens} + {len(answer.output_token_ids)}"
        )
    return answer


def read_capture(path: Path) -> Captured:
    """The tensors in a capture file (docs/design.md, "Capture"). Raises CaptureInvalid for anything else."""
    try:
        file = TensorFile(path, _MAX_HEADER_BYTES)
        return Captured(
            input_ids=_tensor(file, "input_ids", "I64"),
            aux=_tensor(file, "aux", "BF16"),
            last=_tensor(file, "last", "BF16"),
        )
    except TensorFileInvalid as error:
        raise CaptureInvalid(f"capture file {error}") from error


def _tensor(file: TensorFile, name: str, wanted: str) -> npt.NDArray[Any]:
    dtype, values = file.stored(name)
    if dtype != wanted:
        raise CaptureInvalid(f"capture file: {name} is {dtype}, expected {wanted}")
    return values


def make_sample(sample_id: str, answer: Answer, captured: Captured, manifest: Manifest) -> Sample:
    """The sample to store. Raises CaptureInvalid where the states are not those of exactly this answer.

    The last sampled token was never fed to the model, so there are prompt + generated - 1 rows. Rows that are
    all zero are what an engine leaves when it captured nothing there (speculators issue 613).
    """
    if answer.boundaries != manifest.boundaries:
        raise CaptureInvalid(f"boundaries {list(answer.boundaries)}, asked for {list(manifest.boundaries)}")
    if answer.last_norm != manifest.last_norm:
        raise CaptureInvalid(f"last is {answer.last_norm}-norm, asked for {manifest.last_norm}-norm")
    generated = len(answer.output_token_ids)
    if generated < 2:
        raise CaptureInvalid(f"an answer of {generated} token: no generated row to learn from")
    rows = answer.prompt_tokens + generated - 1
    wanted = {
        "input_ids": (rows,),
        "aux": (rows, len(manifest.boundaries), manifest.hidden),
        "last": (rows, manifest.hidden),
    }
    for name, shape in wanted.items():
        actual = getattr(captured, name).shape
        if actual != shape or answer.rows != rows:
            raise CaptureInvalid(
                f"{name} of shape {list(actual)} ({answer.rows} rows said), "
                f"expected {list(shape)} for {answer.prompt_tokens} + {generated} tokens"
            )
    if captured.input_ids[answer.prompt_tokens :].tolist() != list(answer.output_token_ids[:-1]):
        raise CaptureInvalid("the captured ids are not those of the answer")
    if captured.input_ids.min() < 0 or captured.input_ids.max() >= manifest.vocab:
        raise CaptureInvalid(f"a token id outside the vocabulary of {manifest.vocab}")
    for name in ("aux", "last"):
        states = getattr(captured, name)
        if not is_finite(states):
            raise CaptureInvalid(f"NaN or infinity in {name}")
        if not (states & 0x7FFF).any(axis=-1).all():
            raise CaptureInvalid(f"a row of {name} is all zero: nothing was captured there")
    return Sample(
        id=sample_id,
        input_ids=captured.input_ids,
        loss_mask=(np.arange(rows) >= answer.prompt_tokens).astype(np.uint8),
        aux=captured.aux,
        last=captured.last,
    )
