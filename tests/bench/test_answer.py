"""Reading a stream: what counts as tokens, as the first one, and as a failure."""

from __future__ import annotations

import json
from typing import Any

import pytest

from changeover.bench.acceptance import Acceptance
from changeover.bench.answer import AnswerReader


def chunk(
    delta: dict[str, Any] | None = None, finish: str | None = None, tokens: int | None = None, **choice: Any
) -> dict[str, Any]:
    piece: dict[str, Any] = {
        "choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish, **choice}]
    }
    if tokens is not None:
        piece["usage"] = {"prompt_tokens": 3, "completion_tokens": tokens}
    return piece


def usage(tokens: int, **extra: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens, **extra}}


def read(*events: dict[str, Any] | bytes) -> AnswerReader:
    reader = AnswerReader()
    for second, event in enumerate(events):
        reader.accept(event if isinstance(event, bytes) else json.dumps(event).encode(), float(second))
    reader.close()
    return reader


def test_empty_role_chunk_is_not_the_first_token() -> None:
    reader = read(chunk({"role": "assistant", "content": ""}, tokens=0), chunk({"content": "a"}, tokens=1))
    assert [arrival.at_s for arrival in reader.arrivals] == [1.0]


def test_closing_usage_is_a_count_and_not_an_arrival() -> None:
    reader = read(chunk({"content": "a"}), chunk({"content": "b"}), chunk(finish="stop"), usage(3))
    assert [arrival.at_s for arrival in reader.arrivals] == [0.0, 1.0]
    assert (reader.last_s, reader.output_tokens, reader.failure) == (2.0, 3, None)


def test_total_in_the_finishing_chunk_only_is_not_an_arrival() -> None:
    reader = read(chunk({"content": "a"}), chunk({}, "stop", tokens=2))
    assert len(reader.arrivals) == 1 and reader.output_tokens == 2


def test_sglang_12389_chunks_with_empty_text_are_counted_by_usage() -> None:
    reader = read(*(chunk({"content": ""}, tokens=n) for n in (0, 1, 2, 4)), chunk({}, "length", tokens=4))
    assert [arrival.output_tokens for arrival in reader.arrivals] == [1, 2, 4]
    assert reader.arrivals[0].at_s == 1.0


def test_sglang_12389_chunks_with_token_ids_and_empty_text_carry_tokens() -> None:
    reader = read(chunk(token_ids=[7]), chunk(token_ids=[8]), chunk({}, "length"), usage(2))
    assert [arrival.at_s for arrival in reader.arrivals] == [0.0, 1.0]


def test_reasoning_and_tool_calls_are_generated_text() -> None:
    reader = read(
        chunk({"reasoning_content": "hm"}),
        chunk({"reasoning": "so"}),
        chunk({"tool_calls": [{"function": {"arguments": "{}"}}]}),
        chunk({"content": None}),
        chunk({}, "tool_calls"),
    )
    assert len(reader.arrivals) == 3
    assert "".join(reader.texts).startswith("hmso[") and reader.failure is None


def test_text_completion() -> None:
    events = [{"choices": [{"text": text, "finish_reason": None}]} for text in ("a", "b")]
    reader = read(*events, {"choices": [{"text": "", "finish_reason": "stop"}]})
    assert "".join(reader.texts) == "ab" and reader.failure is None


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_aborted_request_is_a_failure_although_http_said_200(finish: str) -> None:
    reader = read(chunk({"content": "a"}), chunk({}, finish))
    assert reader.failure is not None and reader.failure.reason == "aborted"


@pytest.mark.parametrize(
    "event", [{"error": {"message": "out of memory"}}, {"object": "error", "message": "out of memory"}]
)
def test_error_event_is_a_failure_although_http_said_200(event: dict[str, Any]) -> None:
    reader = read(chunk({"content": "a"}), event)
    assert reader.failure is not None
    assert reader.failure.reason == "error event" and "out of memory" in reader.failure.detail


def test_stream_without_finish_reason_is_cut_off() -> None:
    reader = read(chunk({"content": "a"}), b"[DONE]")
    assert reader.failure is not None and reader.failure.reason == "cut off"


@pytest.mark.parametrize("event", [b"{", b"[1]", b'{"x": NaN}'])
def test_event_that_is_not_an_object_of_strict_json(event: bytes) -> None:
    reader = read(event)
    assert reader.failure is not None and reader.failure.reason == "bad event"


def test_first_failure_is_the_one_that_is_told() -> None:
    reader = read({"error": {"message": "first"}}, chunk({}, "abort"))
    assert reader.failure is not None and "first" in reader.failure.detail


def test_cached_tokens_come_from_the_usage() -> None:
    assert read(usage(1, prompt_tokens_details={"cached_tokens": 2})).cached_tokens == 2
    assert read(usage(1, prompt_tokens_details=None)).cached_tokens is None


def test_what_was_drafted_for_the_request_comes_from_the_last_usage() -> None:
    counts = {"drafts": 4, "draft_tokens": 12, "accepted_tokens": 5}
    assert read(chunk({"content": "a"}, tokens=1), usage(9, speculation=counts)).speculation == Acceptance(
        4, 12, 5
    )


def test_sglang_says_it_beside_the_usage() -> None:
    details = {"spec_verify_ct": 17, "spec_num_proposed_drafts": 51, "spec_num_correct_drafts": 15}
    last = {"choices": [], "usage": {"completion_tokens": 9}, "sglext": {"spec_tokens_details": details}}
    assert read(chunk({"content": "a"}, tokens=1), last).speculation == Acceptance(17, 51, 15)


@pytest.mark.parametrize("said", [None, [], {}, {"drafts": 4, "draft_tokens": -1, "accepted_tokens": 5}])
def test_speculation_that_is_not_counts_is_unknown(said: object) -> None:
    assert read(usage(1, speculation=said)).speculation is None


@pytest.mark.parametrize("count", [True, -1, "3", 2.5, None])
def test_usage_that_is_not_a_count_is_unknown(count: object) -> None:
    assert read({"choices": [], "usage": {"completion_tokens": count}}).output_tokens is None
