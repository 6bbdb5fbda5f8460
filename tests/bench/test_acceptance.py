"""Acceptance is what the server counted during the repeat, or nothing with a reason."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from changeover.bench.acceptance import (
    INTERVAL_METHOD,
    NO_COUNTERS,
    Acceptance,
    acceptance_between,
    acceptance_by_steps,
    acceptance_of,
    engine_of,
    generated_between,
    pool_acceptance,
    prompt_counts,
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


def test_what_each_answer_says_is_added_up_and_one_that_says_nothing_is_no_sample() -> None:
    answers = [Acceptance(17, 51, 15), Acceptance(3, 9, 0)]
    assert acceptance_of(answers) == (Acceptance(20, 60, 15), None)
    assert acceptance_of([*answers, None]) == (
        None,
        "1 of 3 answers do not say what was drafted for them",
    )
    assert acceptance_of([Acceptance(0, 0, 0)]) == (None, "the server made no draft in this repeat")


def steps(verified: int, generated: int) -> dict[str, float]:
    by_rank = {0: verified - 2, 1: 2}
    text = "".join(f'sglang:spec_verify_calls_total{{dp_rank="{rank}"}} {n}\n' for rank, n in by_rank.items())
    return read_counters(text + f"sglang:generation_tokens_total {generated}\n")


def test_an_sglang_that_says_nothing_in_its_answers_is_counted_by_verify_steps() -> None:
    # 3 answers of 20 tokens: the first of each from its prefill, 57 from 30 steps, so 27 were accepted
    names = speculation_names("sglang")
    acceptance, reason = acceptance_by_steps(steps(10, 100), steps(40, 160), names, [20, 20, 20])
    assert (acceptance, reason) == (Acceptance(30, None, 27), None)
    assert acceptance is not None and (acceptance.length, acceptance.rate) == (1.9, None)


@pytest.mark.parametrize(
    ("after", "tokens", "said"),
    [
        (steps(40, 190), [20, 20, 20], "generated 90 tokens, the answers hold 60"),
        (steps(40, 160), [20, 20, None], "not all steps are ours"),
        (steps(10, 160), [20, 20, 20], "made no draft"),
        ({"sglang:generation_tokens_total": 160.0}, [20, 20, 20], "spec_verify_calls_total"),
    ],
)
def test_verify_steps_that_cannot_be_told_apart_give_no_figure(
    after: dict[str, float], tokens: list[int | None], said: str
) -> None:
    acceptance, reason = acceptance_by_steps(steps(10, 100), after, speculation_names("sglang"), tokens)
    assert acceptance is None and reason is not None and said in reason


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


def level_repeat(by_request: list[list[int] | None], **counted: int) -> dict[str, Any]:
    """A repeat whose counters say what its requests say, unless told."""
    known = [counts for counts in by_request if counts is not None]
    drafts, accepted = sum(counts[0] for counts in known), sum(counts[1] for counts in known)
    counts = {"drafts": drafts, "draft_tokens": 3 * drafts, "accepted_tokens": accepted, **counted}
    return {"acceptance": Acceptance(**counts).to_json(), "acceptance_by_request": by_request}


def pooled(*repeats: dict[str, Any], prompts: int) -> dict[str, Any]:
    found = pool_acceptance(repeats, prompts)
    assert found is not None
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["interval"] is None) == (found["interval_method"] is None) == (found["reason"] is not None)
    return found


def test_pooled_acceptance_weighs_by_drafts_and_needs_every_repeat() -> None:
    parts = [level_repeat([[10, 10]]), level_repeat([[30, 90]])]
    assert pooled(*parts, prompts=1)["length"] == 3.5
    assert pool_acceptance([*parts, {"acceptance": None, "acceptance_by_request": [None]}], 1) is None


drafting = st.tuples(st.integers(1, 200), st.integers(0, 600)).map(list)


@settings(max_examples=30)
@given(drafting, st.integers(5, 12), st.integers(1, 3))
def test_prompts_that_are_all_alike_leave_no_doubt(counts: list[int], prompts: int, repeats: int) -> None:
    found = pooled(*[level_repeat([counts] * prompts)] * repeats, prompts=prompts)
    assert found["interval"] == [found["length"]] * 2
    assert found["interval_method"] == INTERVAL_METHOD


@settings(max_examples=30)
@given(st.lists(drafting, min_size=5, max_size=20))
def test_interval_is_repeatable_and_within_what_the_prompts_show(by_request: list[list[int]]) -> None:
    found = pooled(level_repeat(by_request), prompts=len(by_request))
    assert pooled(level_repeat(by_request), prompts=len(by_request)) == found
    low, high = found["interval"]
    lengths = [1 + accepted / drafts for drafts, accepted in by_request]
    assert min(lengths) <= low + 1e-9 and low <= high and high - 1e-9 <= max(lengths)


def test_interval_holds_the_true_length_in_about_95_of_100_experiments() -> None:
    """Lengths that differ between prompts: a step of prompt n keeps each of three tokens with its own chance."""
    chance = random.Random(5)
    held = 0
    for _ in range(100):
        by_request = []
        for _ in range(40):
            kept = chance.uniform(0.2, 0.8)
            by_request.append([20, sum(chance.random() < kept for _ in range(60))])
        low, high = pooled(level_repeat(by_request), prompts=40)["interval"]
        held += low <= 2.5 <= high
    assert 88 <= held <= 99


def test_more_repeats_of_the_same_prompts_make_nothing_surer() -> None:
    once = level_repeat([[10, accepted] for accepted in (2, 5, 9, 14, 20, 24)])
    assert pooled(once, prompts=6)["interval"] == pooled(once, once, once, prompts=6)["interval"]
    cycled = level_repeat([[10, accepted] for accepted in (2, 5, 9, 14, 20, 24)] * 3)
    assert pooled(cycled, prompts=6)["interval"] == pooled(once, prompts=6)["interval"]


def test_counts_of_a_prompt_are_summed_over_its_requests_and_repeats() -> None:
    repeats = [[[1, 0], [2, 1], [4, 3]], [[8, 5], None, [16, 7]]]
    assert prompt_counts(repeats, 2) == [(1 + 4 + 8 + 16, 0 + 3 + 5 + 7), (2, 1)]


def test_single_prompt_gives_no_interval() -> None:
    found = pooled(level_repeat([[10, 5]]), prompts=1)
    assert found["reason"] == "prompts drafted for: 1; an interval needs 5"


def test_requests_that_drafted_nothing_do_not_count_as_prompts() -> None:
    found = pooled(level_repeat([[10, 5], [0, 0], [0, 0], [10, 4], [9, 4]]), prompts=5)
    assert found["reason"] == "prompts drafted for: 3; an interval needs 5"


@pytest.mark.parametrize("by_request", [[None] * 8, []])
def test_server_without_figures_per_request_gives_no_interval(by_request: list[None]) -> None:
    found = pooled(level_repeat(list(by_request), drafts=80, accepted_tokens=40), prompts=8)
    assert found["length"] == 1.5 and found["reason"] == "the server gives no figures per request"


def test_figures_of_the_requests_must_add_up_to_the_counters() -> None:
    """One request was cut off: the server counted its drafts, and nobody can say whose they were."""
    found = pooled(level_repeat([[10, 5]] * 7 + [None], drafts=80, accepted_tokens=40), prompts=8)
    assert found["interval"] is None
    assert found["reason"].startswith("the requests' figures add up to 70 drafts and 35 accepted tokens")
