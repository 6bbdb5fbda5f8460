"""How each engine is asked for the states of an answer, and how it gives them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from changeover.machine.errors import InvalidInput
from changeover.states.captures import (
    Answer,
    Captured,
    CaptureInvalid,
    parse_answer,
    read_capture,
)
from changeover.states.final_norm import FinalNorm, read_final_norm
from changeover.states.params import CollectParams
from changeover.states.tensors import TensorFileInvalid, read_tensor, read_tensor_header, to_bf16_bits

FILE_WAIT_S = 30.0
"""How long a file may come after its answer. vLLM answers before it writes; a server that never writes (its stock
connector on a CPU does not) is found out by this."""
_LOOK_S = 0.01


class CaptureSource(Protocol):
    """One engine's way. All raise CaptureInvalid for what is not as it must be."""

    def request_fields(self, name: str) -> dict[str, Any]:
        """What is added to a chat completion so that its states are captured under this name."""
        ...

    def answer(self, body: object, name: str) -> Answer: ...

    def read(self, path: Path, answer: Answer) -> Captured: ...


class EmbeddedSource:
    """Our own server: the answer tells of the capture, whose file is whole before it is sent."""

    def request_fields(self, name: str) -> dict[str, Any]:
        return {"capture": {"path": name}}

    def answer(self, body: object, name: str) -> Answer:
        answer = parse_answer(body)
        if answer.path != name:
            raise CaptureInvalid(f"captured as {answer.path!r}, asked for {name!r}")
        return answer

    def read(self, path: Path, answer: Answer) -> Captured:
        return read_capture(path)


class VllmSource:
    """vLLM with our connector (``engines/vllm_side``): the boundaries and the last layer's output, before the final
    norm, in one tensor; the answer says its token ids.
    """

    def __init__(self, boundaries: tuple[int, ...], norm: FinalNorm, wait: Callable[[Path], None]) -> None:
        self._boundaries = boundaries
        self._norm = norm
        self._wait = wait

    def request_fields(self, name: str) -> dict[str, Any]:
        params = {"changeover_name": name, "include_output_tokens": True}
        return {"kv_transfer_params": params, "return_token_ids": True}

    def answer(self, body: object, name: str) -> Answer:
        try:
            if not isinstance(body, dict):
                raise TypeError("the body is not an object")
            choice, usage = body["choices"][0], body["usage"]
            prompt_tokens, output = int(usage["prompt_tokens"]), tuple(int(i) for i in choice["token_ids"])
            if len(body["prompt_token_ids"]) != prompt_tokens or len(output) != int(
                usage["completion_tokens"]
            ):
                raise CaptureInvalid("usage and token ids do not agree")
            return Answer(
                text=str(choice["message"]["content"] or ""),
                finish_reason=choice.get("finish_reason"),
                prompt_tokens=prompt_tokens,
                output_token_ids=output,
                rows=prompt_tokens + len(output) - 1,
                boundaries=self._boundaries,
                last_norm="post",
                bytes=0,
                path=name,
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CaptureInvalid(f"the answer lacks a field: {type(error).__name__}: {error}") from error

    def read(self, path: Path, answer: Answer) -> Captured:
        self._wait(path)
        try:
            header = read_tensor_header(path)
            states = read_tensor(path, header, "hidden_states")
            ids = read_tensor(path, header, "token_ids")
        except TensorFileInvalid as error:
            raise CaptureInvalid(str(error)) from error
        layers = len(self._boundaries) + 1
        if states.ndim != 3 or states.shape[1] != layers or ids.dtype != np.int64:
            raise CaptureInvalid(
                f"hidden_states of shape {list(states.shape)}, expected [tokens, {layers}, hidden]: "
                f"boundaries {list(self._boundaries)} and the last layer's"
            )
        if not np.isfinite(states).all():
            raise CaptureInvalid("NaN or infinity in hidden_states")
        last = self._norm.apply(states[:, -1])
        return Captured(input_ids=ids, aux=to_bf16_bits(states[:, :-1]), last=to_bf16_bits(last))


def capture_source(params: CollectParams) -> CaptureSource:
    """For the engine that the server is of. Raises InvalidInput for one that captures nothing here."""
    if params.engine_kind == "embedded":
        return EmbeddedSource()
    if params.engine_kind == "vllm":
        return VllmSource(params.boundaries, read_final_norm(params.model_path), wait_for_file)
    raise InvalidInput(
        expected="an engine that captures: embedded or vllm",
        seen=params.engine_kind,
        todo="Set engine.kind of the capture phase's pipeline.",
    )


def wait_for_file(path: Path) -> None:
    """Until it is there (it comes by a rename, so it is whole then). Raises CaptureInvalid at the deadline."""
    until_s = time.monotonic() + FILE_WAIT_S
    while not path.exists():
        if time.monotonic() > until_s:
            raise CaptureInvalid(
                f"the server answered, and {FILE_WAIT_S:.0f} s later no file {path.name} is there: it captures nothing"
            )
        time.sleep(_LOOK_S)
