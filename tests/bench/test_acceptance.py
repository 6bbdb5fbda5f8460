"""Acceptance is what the server counted during the repeat, or nothing with a reason."""

from __future__ import annotations

import pytest

from changeover.bench.acceptance import (
    NO_COUNTERS,
    acceptance_between,
    engine_of,
    generated_between,
    read_counters,
    speculation_names,
)

VLLM = speculation_names("vllm")


def metrics(
    drafts: float, draft_tokens: float, accepted: float, prefix: str = "vllm", labels: str = ""
) -> str:
    return (
        f"# HELP {prefix}:spec_decode_num_drafts_total Number of drafts.\n"
        f"# TYPE {prefix}:spec_decode_num_drafts_total counter\n"
        f"{prefix}:spec_decode_num_drafts_total{labels} {drafts}\n"
        f"{prefix}:spec_decode_num_drafts_created{labels} 1.79e+09\n"
        f"{prefix}:spec_decode_num_draft_tokens_total{labels} {draft_tokens}\n"
        f"{prefix}:spec_decode_num_accepted_tokens_total{labels} {accepted}\n"
    )


def test_sglang_34743_lifetime_and_other_ranks_are_not_mixed_in() -> None:
    rank0, rank1 = '{engine="0",model_name="a b"}', '{engine="1",model_name="a b"}'
    before = metrics(1000, 3000, 2900, labels=rank0) + metrics(0, 0, 0, labels=rank1)
    after = metrics(1010, 3030, 2905, labels=rank0) + metrics(30, 90, 35, labels=rank1)
    acceptance, reason = acceptance_between(read_counters(before), read_counters(after), VLLM)
    assert reason is None and acceptance is not None
    assert (acceptance.drafts, acceptance.draft_tokens, acceptance.accepted_tokens) == (40, 120, 40)
    assert acceptance.length == 2.0
    assert acceptance.rate == pytest.approx(1 / 3)


def test_sglang_29329_a_counter_that_went_backwards_gives_no_figure() -> None:
    acceptance, reason = acceptance_between(
        read_counters(metrics(50, 150, 20)), read_counters(metrics(9, 27, 3)), VLLM
    )
    assert acceptance is None
    assert reason == "vllm:spec_decode_num_drafts_total went backwards, from 50 to 9: the server was reset"


def test_embedded_names_are_known() -> None:
    before, after = metrics(0, 0, 0, "changeover"), metrics(4, 12, 6, "changeover")
    acceptance, _ = acceptance_between(
        read_counters(before), read_counters(after), speculation_names("embedded")
    )
    assert acceptance is not None and acceptance.length == 2.5


def test_counters_that_appear_during_the_repeat_started_at_zero() -> None:
    acceptance, _ = acceptance_between({}, read_counters(metrics(2, 6, 3)), VLLM)
    assert acceptance is not None and acceptance.length == 2.5


def test_gauge_is_not_taken_for_the_acceptance_of_the_repeat() -> None:
    counters = read_counters("sglang:spec_accept_length 2.9\n")
    acceptance, reason = acceptance_between({}, counters, speculation_names("sglang"))
    assert (acceptance, reason) == (None, "no counters of drafts; only the gauge sglang:spec_accept_length")


def test_server_without_speculation_says_so() -> None:
    assert acceptance_between({}, {}, VLLM) == (
        None,
        "the server publishes no vllm:spec_decode_num_drafts_total",
    )
    assert speculation_names("openai") == NO_COUNTERS
    assert acceptance_between({}, {}, NO_COUNTERS) == (None, "no counters of drafts")


def test_server_that_drafted_nothing() -> None:
    same = read_counters(metrics(5, 15, 5))
    assert acceptance_between(same, same, VLLM) == (None, "the server made no draft in this repeat")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_a_number_is_not_a_count(value: float) -> None:
    acceptance, reason = acceptance_between({}, read_counters(metrics(value, 1, 1)), VLLM)
    assert acceptance is None and reason is not None and "not a count" in reason


def test_exposition_reader_skips_what_it_does_not_understand() -> None:
    text = 'x{path="/a} b"} 2 1700000000\nx 3\nbroken{ 1\nword many\n\n# x 9\n'
    assert read_counters(text) == {"x": 5.0}


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("vllm:num_requests_running 0\n", "vllm"),
        ("sglang:num_running_reqs 0\n", "sglang"),
        ("changeover:num_requests_running 0\n", "embedded"),
        ("python_gc_objects_collected_total 4\n", "openai"),
        ("", "openai"),
    ],
)
def test_engine_by_its_metrics(text: str, engine: str) -> None:
    assert engine_of(read_counters(text)) == engine


def test_generated_tokens_between() -> None:
    assert (
        generated_between({"vllm:generation_tokens_total": 5.0}, {"vllm:generation_tokens_total": 9.0}) == 4
    )
    assert (
        generated_between({"vllm:generation_tokens_total": 5.0}, {"vllm:generation_tokens_total": 2.0})
        is None
    )
    assert generated_between({}, {}) is None
