"""How each engine is asked for the states of an answer, and how it gives them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from changeover.machine.clock import Clock
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
from changeover.states.tensors import TensorFile, TensorFileInvalid, to_bf16_bits

FILE_WAIT_S = 30.0
"""How long a file may come after its answer. vLLM answers before it writes; a server that never writes (its stock
connector on a CPU does not) is found out by this."""
_LOOK_S = 0.01


class CaptureSource(Protocol):
    """One engine's way. All raise CaptureInvalid for what is not as it must be."""

    def request_fields(self, name: str) -> dict[str, Any]:
        """What is added to a chat completion so that its states are captured under this name."""
        ...

    def second_request(self, body: object, path: Path) -> tuple[str, dict[str, Any]] | None:
        """(path on the server, body) where a second request makes the capture of the first one's answer."""
        ...

    def answer(self, body: object, name: str) -> Answer: ...

    def read(self, path: Path, answer: Answer) -> Captured: ...


class EmbeddedSource:
    """Our own server: the answer tells of the capture, whose file is whole before it is sent."""

    def request_fields(self, name: str) -> dict[str, Any]:
        return {"capture": {"path": name}}

    def second_request(self, body: object, path: Path) -> None:
        return None

    def answer(self, body: object, name: str) -> Answer:
        answer = parse_answer(body)
        if answer.path != name:
            raise CaptureInvalid(f"captured as {answer.path!r}, asked for {name!r}")
        return answer

    def read(self, path: Path, answer: Answer) -> Captured:
        return read_capture(path)


class VllmSource:
    """vLLM with our connector (``engines/side``): the boundaries and the last layer's output, before the final
    norm, in one tensor; the answer says its token ids.
    """

    def __init__(self, boundaries: tuple[int, ...], norm: FinalNorm, clock: Clock) -> None:
        self._boundaries = boundaries
        self._norm = norm
        self._clock = clock

    def request_fields(self, name: str) -> dict[str, Any]:
        params = {"changeover_name": name, "include_output_tokens": True}
        return {"kv_transfer_params": params, "return_token_ids": True}

    def second_request(self, body: object, path: Path) -> None:
        return None

    def answer(self, body: object, name: str) -> Answer:
        return _answer_with_ids(body, name, self._boundaries)[0]

    def read(self, path: Path, answer: Answer) -> Captured:
        wait_for_file(path, self._clock)
        states, ids = _tensors(path, "hidden_states", "token_ids")
        layers = len(self._boundaries) + 1
        if states.ndim != 3 or states.shape[1] != layers or ids.dtype != np.int64:
            raise CaptureInvalid(
                f"hidden_states of shape {list(states.shape)}, expected [tokens, {layers}, hidden]: "
                f"boundaries {list(self._boundaries)} and the last layer's"
            )
        _expect_finite(hidden_states=states)
        last = self._norm.apply(states[:, -1])
        return Captured(input_ids=ids, aux=to_bf16_bits(states[:, :-1]), last=to_bf16_bits(last))


class SglangSource:
    """SGLang with our hook (``engines/side``): the answer, fed once more as a prompt, is captured as it is
    prefilled; a file announces it by the hash of its ids.
    """

    def __init__(self, boundaries: tuple[int, ...], clock: Clock) -> None:
        self._boundaries = boundaries
        self._clock = clock

    def request_fields(self, name: str) -> dict[str, Any]:
        return {"return_token_ids": True, "return_prompt_token_ids": True}

    def second_request(self, body: object, path: Path) -> tuple[str, dict[str, Any]]:
        answer, prompt = _answer_with_ids(body, path.name, self._boundaries)
        fed = [*prompt, *answer.output_token_ids[:-1]]
        _announcement(path.parent, fed).write_text(path.name)
        return "/generate", {"input_ids": fed, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}

    def answer(self, body: object, name: str) -> Answer:
        return _answer_with_ids(body, name, self._boundaries)[0]

    def read(self, path: Path, answer: Answer) -> Captured:
        wait_for_file(path, self._clock)
        aux, last, ids = _tensors(path, "aux", "last", "token_ids")
        _announcement(path.parent, ids.tolist()).unlink(missing_ok=True)
        _expect_finite(aux=aux, last=last)
        return Captured(input_ids=ids, aux=to_bf16_bits(aux), last=to_bf16_bits(last))


def _announcement(folder: Path, ids: Sequence[int]) -> Path:
    sha256 = hashlib.sha256(np.asarray(ids, np.int64).tobytes()).hexdigest()
    return folder / f"want-{sha256}"


def _answer_with_ids(body: object, name: str, boundaries: tuple[int, ...]) -> tuple[Answer, tuple[int, ...]]:
    """The answer of a server that says its token ids, and the prompt's ids. Raises CaptureInvalid.

    vLLM puts the prompt's beside the choices and the answer's in ``token_ids``; SGLang both into the choice.
    """
    try:
        if not isinstance(body, dict):
            raise TypeError("the body is not an object")
        choice, usage = body["choices"][0], body["usage"]
        prompt = tuple(int(i) for i in choice.get("prompt_token_ids") or body["prompt_token_ids"])
        output = tuple(int(i) for i in choice.get("response_token_ids") or choice["token_ids"])
        text, finish_reason = str(choice["message"]["content"] or ""), choice.get("finish_reason")
        used = (int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CaptureInvalid(f"the answer lacks a field: {type(error).__name__}: {error}") from error
    if used != (len(prompt), len(output)):
        raise CaptureInvalid(
            f"usage says {used[0]} + {used[1]} tokens, the ids are {len(prompt)} + {len(output)}"
        )
    answer = Answer(
        text=text,
        finish_reason=finish_reason,
        prompt_tokens=len(prompt),
        output_token_ids=output,
        rows=len(prompt) + len(output) - 1,
        boundaries=boundaries,
        last_norm="post",
        bytes=0,
        path=name,
    )
    return answer, prompt


def _tensors(path: Path, *names: str) -> list[npt.NDArray[Any]]:
    try:
        file = TensorFile(path)
        return [file.read(name) for name in names]
    except TensorFileInvalid as error:
        raise CaptureInvalid(str(error)) from error


def _expect_finite(**tensors: npt.NDArray[Any]) -> None:
    for name, values in tensors.items():
        if not np.isfinite(values).all():
            raise CaptureInvalid(f"NaN or infinity in {name}")


def capture_source(params: CollectParams, clock: Clock) -> CaptureSource:
    """For the engine that the server is of. Raises InvalidInput for one that captures nothing here."""
    if params.engine_kind == "embedded":
        return EmbeddedSource()
    if params.engine_kind == "vllm":
        return VllmSource(params.boundaries, read_final_norm(params.model_path), clock)
    if params.engine_kind == "sglang":
        return SglangSource(params.boundaries, clock)
    raise InvalidInput(
        expected="an engine that captures: embedded, sglang or vllm",
        seen=params.engine_kind,
        todo="Set engine.kind of the capture phase's pipeline.",
    )


def wait_for_file(path: Path, clock: Clock) -> None:
    """Until it is there (it comes by a rename, so it is whole then). Raises CaptureInvalid at the deadline."""
    until_s = clock.monotonic() + FILE_WAIT_S
    while not path.exists():
        if clock.monotonic() > until_s:
            raise CaptureInvalid(
                f"the server answered, and {FILE_WAIT_S:.0f} s later no file {path.name} is there: it captures nothing"
            )
        clock.sleep(_LOOK_S)
