"""OpenAI's request and response shapes: JSON in, a checked request out; no I/O and no model.

Fields that would change the answer and that this server does not do are refused, never ignored; fields that
change nothing (``user``, ``metadata`` ...) are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from changeover.engines.embedded.sampling import SamplingParams
from changeover.engines.side.changeover_files import CAPTURE_NAME

DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's /v1/completions generates where ``max_tokens`` is absent."""


_REFUSED_UNLESS: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "stop_token_ids": ([],),
}


class RequestRefused(Exception):  # noqa: N818 - read as a sentence: "raise RequestRefused"
    """A request that cannot be served, with its HTTP status and OpenAI's error ``type``."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.status = message, param, status

    def to_json(self) -> dict[str, Any]:
        kinds = {404: "not_found_error", 503: "service_unavailable", 500: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


@dataclass(frozen=True)
class GenerationRequest:
    """A checked request. ``max_tokens`` None means: as many as the context holds."""

    model: str | None
    text: str | None
    token_ids: tuple[int, ...] | None
    messages: tuple[dict[str, Any], ...] | None
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    capture_name: str | None

    @property
    def chat(self) -> bool:
        return self.messages is not None

    def sampling(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
        )


def parse_completion(body: Any) -> GenerationRequest:
    """A ``/v1/completions`` body; ``prompt`` is one text or one list of token ids."""
    fields = _object(body)
    prompt = fields.get("prompt")
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, list) and all(_is_int(item) for item in prompt):
        token_ids = tuple(prompt)
    else:
        raise RequestRefused(
            "'prompt' must be one string or one list of token ids (one request a prompt), "
            f"not {_shown(prompt)}",
        )
    return _common(fields, text=text, token_ids=token_ids, messages=None, default=DEFAULT_COMPLETION_TOKENS)


def parse_chat(body: Any) -> GenerationRequest:
    """A ``/v1/chat/completions`` body; contents are text (a string, or parts of type ``text``)."""
    fields = _object(body)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestRefused(
            f"'messages' must be a list with at least one message, not {_shown(messages)}", param="messages"
        )
    checked = tuple(_message(message, at) for at, message in enumerate(messages))
    return _common(fields, text=None, token_ids=None, messages=checked, default=None)


def _message(message: Any, at: int) -> dict[str, Any]:
    where = f"messages[{at}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestRefused(f"{where} must be an object with 'role' and 'content'", param=where)
    content = message.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RequestRefused(f"{where}.content must be text, not {_shown(content)}", param=f"{where}.content")
    return {"role": message["role"], "content": content}


def _common(
    fields: Mapping[str, Any],
    *,
    text: str | None,
    token_ids: tuple[int, ...] | None,
    messages: tuple[dict[str, Any], ...] | None,
    default: int | None,
) -> GenerationRequest:
    for name, allowed in _REFUSED_UNLESS.items():
        value = fields.get(name)
        if value is not None and value not in allowed:
            raise RequestRefused(f"'{name}' = {_shown(value)} is not supported by this server", param=name)
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise RequestRefused(f"'model' must be a string, not {_shown(model)}", param="model")
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise RequestRefused(
            f"'stream_options' must be an object, not {_shown(options)}", param="stream_options"
        )
    temperature = _number(fields, "temperature", 1.0, 0.0, 100.0)
    # Below 0.01 the softmax overflows long before sampling differs from greedy (the rule that vLLM warns
    # about).
    temperature = 0.0 if temperature < 0.01 else temperature
    top_p = _number(fields, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise RequestRefused("'top_p' must be above 0 and at most 1", param="top_p")
    return GenerationRequest(
        model=model,
        text=text,
        token_ids=token_ids,
        messages=messages,
        max_tokens=_max_tokens(fields, default),
        temperature=temperature,
        top_p=top_p,
        seed=_optional_int(fields, "seed"),
        stop=_stops(fields.get("stop")),
        ignore_eos=_flag(fields, "ignore_eos"),
        stream=_flag(fields, "stream"),
        include_usage=_flag(options or {}, "include_usage"),
        continuous_usage=_flag(options or {}, "continuous_usage_stats"),
        capture_name=_capture_name(fields.get("capture")),
    )


def _object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise RequestRefused(f"the body must be a JSON object, not {_shown(body)}")
    return body


def _max_tokens(fields: Mapping[str, Any], default: int | None) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = _optional_int(fields, name)
        if value is not None:
            if value < 1:
                raise RequestRefused(f"'{name}' must be at least 1, not {value}", param=name)
            return value
    return default


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise RequestRefused(
            f"'stop' must be a string or a list of strings, not {_shown(value)}", param="stop"
        )
    return tuple(stops)


def _capture_name(value: Any) -> str | None:
    if value is None:
        return None
    name = value.get("path") if isinstance(value, dict) else None
    if not isinstance(name, str) or not CAPTURE_NAME.fullmatch(name):
        raise RequestRefused(
            "'capture' must be {\"path\": NAME} with a bare file name that ends in .safetensors "
            f"(letters, digits, '.', '_', '-'; no folder), not {_shown(value)}",
            param="capture",
        )
    return name


def _number(fields: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise RequestRefused(
            f"'{name}' must be a number from {low} to {high}, not {_shown(value)}", param=name
        )
    return float(value)


def _optional_int(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is not None and not _is_int(value):
        raise RequestRefused(f"'{name}' must be a whole number, not {_shown(value)}", param=name)
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestRefused(f"'{name}' must be true or false, not {_shown(value)}", param=name)
    return bool(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class ResponseShape:
    """Builds the JSON of one answer, whole or in chunks, for both routes."""

    request_id: str
    created: int
    model: str
    chat: bool

    def whole(self, text: str, finish_reason: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [choice], "usage": dict(usage)}

    def first_chunk(self) -> dict[str, Any] | None:
        """Chat streams open with the role."""
        return self._chunk({"role": "assistant", "content": ""}, None) if self.chat else None

    def chunk(self, text: str, finish_reason: str | None, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        """``usage`` so far, where the client asked for it (``continuous_usage_stats``, as in vLLM)."""
        chunk = self._chunk({"content": text} if self.chat else text, finish_reason)
        return chunk if usage is None else {**chunk, "usage": dict(usage)}

    def last_chunk(self, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        """No choices; ``usage`` where the client asked for it."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        tail: dict[str, Any] = {**self._head(kind), "choices": []}
        if usage is not None:
            tail["usage"] = dict(usage)
        return tail

    def _chunk(self, delta: Any, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        choice["delta" if self.chat else "text"] = delta
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def sequence_of_ids(ids: Sequence[int], vocab: int) -> list[int]:
    """Token ids from outside, checked against the vocabulary."""
    bad = [one for one in ids if not 0 <= one < vocab]
    if bad:
        raise RequestRefused(f"token ids must be from 0 to {vocab - 1}, not {bad[0]}", param="prompt")
    return list(ids)
