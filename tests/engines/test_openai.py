"""Request bodies: what is understood, and that what is not is refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from changeover.engines.embedded.openai import RequestRefused, parse_chat, parse_completion


def test_a_completion_with_every_understood_field() -> None:
    request = parse_completion(
        {
            "model": "m", "prompt": "Hi", "max_tokens": 5, "temperature": 0, "top_p": 0.9, "seed": 7,
            "stop": ["a", "b"], "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
            "capture": {"path": "x-1.safetensors"}, "user": "ignored",
        }
    )  # fmt: skip
    assert (request.text, request.max_tokens, request.temperature, request.top_p) == ("Hi", 5, 0.0, 0.9)
    assert (request.seed, request.stop, request.ignore_eos) == (7, ("a", "b"), True)
    assert request.stream and request.include_usage and request.capture_name == "x-1.safetensors"


def test_defaults_are_openais() -> None:
    assert parse_completion({"prompt": [1, 2]}).max_tokens == 16
    assert parse_completion({"prompt": [1, 2]}).token_ids == (1, 2)
    assert parse_completion({"prompt": [[1, 2]]}).token_ids == (1, 2)
    chat = parse_chat({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]})
    assert chat.max_tokens is None and chat.temperature == 1.0 and not chat.stream
    assert chat.messages == ({"role": "user", "content": "Hi"},)


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert parse_chat({"messages": messages, "max_tokens": 3, "max_completion_tokens": 9}).max_tokens == 9


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": None}, "'prompt'"),
        ({"prompt": ["a", "b"]}, "one request a prompt"),
        ({"prompt": [1, "a"]}, "'prompt'"),
        ({"prompt": [True]}, "'prompt'"),
        ({"max_tokens": 0}, "at least 1"),
        ({"max_tokens": "5"}, "whole number"),
        ({"temperature": -1}, "'temperature'"),
        ({"temperature": "hot"}, "'temperature'"),
        ({"temperature": True}, "'temperature'"),
        ({"top_p": 0}, "'top_p'"),
        ({"top_p": 1.5}, "'top_p'"),
        ({"seed": 1.5}, "'seed'"),
        ({"stop": 5}, "'stop'"),
        ({"stop": [""]}, "'stop'"),
        ({"stream": "yes"}, "'stream'"),
        ({"stream_options": 3}, "'stream_options'"),
        ({"n": 2}, "'n'"),
        ({"logprobs": 5}, "'logprobs'"),
        ({"presence_penalty": 0.5}, "'presence_penalty'"),
        ({"tools": [{"type": "function"}]}, "'tools'"),
        ({"response_format": {"type": "json_object"}}, "'response_format'"),
        ({"model": 5}, "'model'"),
        ({"capture": "x.safetensors"}, "'capture'"),
        ({"capture": {"path": "../x.safetensors"}}, "bare file name"),
        ({"capture": {"path": "/tmp/x.safetensors"}}, "bare file name"),
        ({"capture": {"path": "a/b.safetensors"}}, "bare file name"),
        ({"capture": {"path": ".hidden.safetensors"}}, "bare file name"),
        ({"capture": {"path": "x.bin"}}, "bare file name"),
        ({"capture": {"path": "x.safetensors\n"}}, "bare file name"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        parse_completion({"prompt": "Hi", **change})
    assert said in refused.value.message
    assert refused.value.status == 400
    assert refused.value.to_json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "Hi",
        [{"content": "Hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ],
)
def test_messages_that_are_none_are_refused(messages: Any) -> None:
    with pytest.raises(RequestRefused, match="messages"):
        parse_chat({"messages": messages})


@pytest.mark.parametrize("body", [None, [], "text", 5])
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    with pytest.raises(RequestRefused, match="JSON object"):
        parse_completion(body)
