"""Each metric from exact times, and each figure that the data does not give."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from changeover.bench.acceptance import Acceptance
from changeover.bench.answer import Answer, Arrival, Failure
from changeover.bench.metrics import (
    Repeat,
    describe,
    judge_client,
    summarise_level,
    summarise_repeat,
    time_answer,
)


def answer(
    times: Sequence[float], tokens: Sequence[int | None], output_tokens: int | None, **changes: Any
) -> Answer:
    facts: dict[str, Any] = {
        "index": 0,
        "prompt_id": "p0",
        "planned_s": 0.0,
        "sent_s": 0.001,
        "arrivals": tuple(Arrival(at, so_far) for at, so_far in zip(times, tokens, strict=True)),
        "last_s": times[-1] if times else None,
        "ended_s": (times[-1] if times else 0.0) + 0.5,
        "text": "x" * len(times),
        "finish_reason": "stop",
        "prompt_tokens": 5,
        "output_tokens": output_tokens,
        "cached_tokens": None,
        "speculation": None,
        "failure": None,
    }
    return Answer(**{**facts, **changes})


def repeat(answers: Sequence[Answer], **changes: Any) -> Repeat:
    facts: dict[str, Any] = {
        "repeat": 1,
        "concurrency": 1,
        "started_s": 0.0,
        "seconds": 2.0,
        "answers": tuple(answers),
        "acceptance": None,
        "acceptance_missing": "not speculative",
        "loop_lags_s": (0.0,),
        "cpu_s": 0.1,
    }
    return Repeat(**{**facts, **changes})


def test_one_token_a_chunk() -> None:
    timing = time_answer(answer([0.101, 0.111, 0.121, 0.131], [1, 2, 3, 4], 4))
    assert timing.ttft_s == pytest.approx(0.1)
    assert timing.tpot_s == pytest.approx(0.01)
    assert timing.chunk_gaps_s == pytest.approx((0.01, 0.01, 0.01))
    assert timing.sched_lag_s == pytest.approx(0.001)
    assert timing.e2e_s == pytest.approx(0.63)
    assert timing.missing == {}


def test_inference_perf_364_chunks_of_three_tokens_are_not_three_times_slower() -> None:
    # 3 tokens every 30 ms: 10 ms a token; the gap between chunks (ITL in vLLM's client) is 30 ms
    timing = time_answer(answer([0.1, 0.13, 0.16, 0.19], [3, 6, 9, 12], 12))
    assert timing.tpot_s == pytest.approx(0.01)
    assert timing.chunk_gaps_s == pytest.approx((0.03, 0.03, 0.03))


def test_aiperf_1279_bundled_first_chunk_does_not_make_the_rest_look_faster() -> None:
    # 8 tokens in the first chunk, then one each 10 ms: (n_out - 1) would say 3.6 ms
    timing = time_answer(answer([0.1, 0.11, 0.12, 0.13], [8, 9, 10, 11], 11))
    assert timing.first_chunk_tokens == 8
    assert timing.tpot_s == pytest.approx(0.01)


def test_unknown_first_chunk_gives_no_tpot_unless_chunks_and_tokens_are_as_many() -> None:
    unknown = time_answer(answer([0.1, 0.13], [None, None], 6))
    assert unknown.tpot_s is None and "first chunk" in unknown.missing["tpot_s"]
    known = time_answer(answer([0.1, 0.13], [None, None], 2))
    assert known.tpot_s == pytest.approx(0.03)


def test_usage_missing_gives_null_and_never_a_guess() -> None:
    told = answer([0.1, 0.2], [None, None], 2)
    silent = answer([0.1, 0.2], [None, None], None)
    summary = summarise_repeat(repeat([told, silent]))
    assert summary["output_tokens"] is None and summary["output_tok_s"] is None
    assert summary["missing"]["output_tok_s"] == "1 of 2 answers came without usage"
    assert "no usage" in summary["missing"]["tpot_s"]
    assert summary["request_s"] == 1.0


def test_sglang_12389_answer_without_any_text_has_no_ttft_of_zero_and_no_infinity() -> None:
    summary = summarise_repeat(repeat([answer([], [], 16, text="")]))
    assert summary["ttft_s"] is None and summary["tpot_s"] is None
    assert "no chunk carried tokens" in summary["missing"]["ttft_s"]
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_all_tokens_in_one_chunk_have_no_time_between_them() -> None:
    timing = time_answer(answer([0.1], [16], 16))
    assert timing.tpot_s is None and timing.ttft_s is not None


def test_failures_are_counted_by_reason_and_are_in_no_figure() -> None:
    """pegainfer#548: rejected requests were counted as successes of one token."""
    good = answer([0.1, 0.2], [1, 2], 2)
    bad = [answer([], [], None, failure=Failure("HTTP 503", f"draining {n}"), sent_s=None) for n in range(3)]
    summary = summarise_repeat(repeat([good, *bad]))
    assert summary["requests"] == {
        "sent": 4,
        "ok": 1,
        "failed": 3,
        "reasons": {"HTTP 503": {"count": 3, "example": "draining 0"}},
    }
    assert (summary["output_tokens"], summary["output_tok_s"], summary["e2e_s"]["n"]) == (2, 1.0, 1)
    assert summary["output_hashes"][0] and summary["output_hashes"][1:] == [None] * 3


def test_describe_names_what_it_gives() -> None:
    assert describe([]) is None
    figures = describe([0.4, 0.1, 0.2, 0.3])
    assert figures is not None
    assert (figures["n"], figures["max"]) == (4, 0.4)
    assert figures["p50"] == pytest.approx(0.25)
    assert list(figures) == ["n", "mean", "p50", "p90", "p95", "p99", "max"]


def flat(value: float) -> dict[str, float | int]:
    return {"p50": value, "p99": value}


def test_client_is_judged_by_its_own_delays() -> None:
    assert judge_client(flat(0.001), flat(0.002), 0.1, flat(0.1))["valid"]
    slow_send = judge_client(flat(0.011), flat(0.0), 0.1, flat(10.0))
    assert not slow_send["valid"] and "11.0 ms" in slow_send["reasons"][0]
    beside_ttft = judge_client(flat(0.006), flat(0.0), 0.1, flat(0.1))
    assert not beside_ttft["valid"] and "5% of ttft_s p50" in beside_ttft["reasons"][0]
    assert not judge_client(flat(0.0), flat(0.051), 0.1, flat(0.1))["valid"]
    assert not judge_client(flat(0.0), flat(0.0), 0.95, flat(0.1))["valid"]


def test_level_gives_the_mean_of_its_repeats_with_an_interval() -> None:
    repeats = [summarise_repeat(repeat([answer([0.1, 0.2], [1, 2], 2)], seconds=s)) for s in (1.0, 2.0)]
    summary = summarise_level(repeats, 1)["output_tok_s"]
    assert summary["mean"] == pytest.approx(1.5)
    # half width: t(0.975, 1) x s / sqrt(2) = 12.706 x 0.5
    assert summary["interval"] == pytest.approx([1.5 - 6.3531, 1.5 + 6.3531], abs=1e-3)
    alone = summarise_level(repeats[:1], 1)["output_tok_s"]
    assert alone["interval"] is None and alone["reason"] == "no interval: one repeat"


def test_a_level_says_how_sure_its_acceptance_length_is() -> None:
    """Two repeats of six prompts, which accepted 0 to 5 tokens in ten drafts each."""
    answers = [answer([0.1], [1], 1, index=n, speculation=Acceptance(10, 30, n)) for n in range(6)]
    failed = answer([], [], None, index=6, failure=Failure("HTTP 503", "draining"), sent_s=None)
    one = summarise_repeat(repeat([*answers, failed], acceptance=Acceptance(60, 180, 15)))
    assert one["acceptance_by_request"] == [*([10, n] for n in range(6)), None]
    acceptance = summarise_level([one, one], 7)["acceptance"]
    assert (acceptance["drafts"], acceptance["length"], acceptance["reason"]) == (120, 1.25, None)
    low, high = acceptance["interval"]
    assert 1.0 < low < 1.25 < high < 1.5
