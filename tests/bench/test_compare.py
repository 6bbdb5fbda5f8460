"""Comparing results: the verdicts, the words, what is refused, and what is said along with it."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from changeover.bench.compare import compare
from changeover.bench.metrics import Repeat, summarise_level, summarise_repeat
from changeover.machine.errors import InvalidInput
from tests.bench.conftest import Measure
from tests.bench.mock_server import Script, serving
from tests.bench.test_metrics import answer, repeat


def result(*levels: tuple[int, Sequence[float]], **load: Any) -> dict[str, Any]:
    """A benchmark result with the given seconds of each repeat (100 tokens each) at each level."""
    entries = []
    for concurrency, seconds in levels:
        repeats = [summarise_repeat(_repeat(concurrency, n, s)) for n, s in enumerate(seconds, start=1)]
        entries.append(
            {"concurrency": concurrency, "repeats": repeats, "summary": summarise_level(repeats, 1)}
        )
    facts = {"prompts_sha256": "aa", "api": "chat", "max_tokens": 100, "temperature": 0.0, "seed": 0}
    facts |= {
        "ignore_eos": False,
        "requests": 1,
        "distinct_prompts": 1,
        "concurrency": [level for level, _ in levels],
    }
    return {
        "kind": "bench",
        "metric_schema": 1,
        "started_wall": 1.0,
        "server": {"url": "http://h:1", "model": "m", "engine": "embedded"},
        "load": {**facts, "repeats": len(levels[0][1]), "cache_salt": False, **load},
        "levels": entries,
        "warnings": [],
    }


def _repeat(concurrency: int, number: int, seconds: float) -> Repeat:
    one = answer([0.1 * seconds, seconds], [1, 100], 100)
    return repeat([one], repeat=number, concurrency=concurrency, seconds=seconds)


def test_faster_and_not_distinguishable_in_one_sentence() -> None:
    a = result((1, [1.41, 1.42, 1.40]), (4, [1.0, 1.2, 0.9]))
    b = result((1, [1.00, 1.01, 0.99]), (4, [1.1, 0.9, 1.0]))
    comparison = compare(a, b)
    single, four = comparison["levels"]
    assert single["output_tok_s"]["verdict"] == "faster"
    assert single["output_tok_s"]["ratio"] == pytest.approx(1.41, abs=0.001)
    assert four["output_tok_s"]["verdict"] == "not distinguishable"
    assert comparison["sentence"].startswith("B is 1.41 times A single-stream (95 % interval 1.38 to 1.44)")
    assert "; no difference shown at 4 (" in comparison["sentence"]
    json.dumps(comparison, allow_nan=False)


def test_less_time_is_faster_and_more_is_slower() -> None:
    slow, fast = result((1, [2.0, 2.02, 1.98])), result((1, [1.0, 1.01, 0.99]))
    for metric in ("output_tok_s", "ttft_s", "tpot_s", "e2e_s"):
        assert compare(slow, fast)["levels"][0][metric]["verdict"] == "faster", metric
        assert compare(fast, slow)["levels"][0][metric]["verdict"] == "slower", metric


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=5))
def test_a_result_does_not_differ_from_itself(seconds: list[float]) -> None:
    same = result((1, seconds))
    level = compare(same, same)["levels"][0]
    assert level["output_tok_s"]["verdict"] == "not distinguishable"
    assert level["output_tok_s"]["ratio"] == pytest.approx(1.0)
    assert level["outputs_equal"]["share"] == 1.0


def test_single_repeat_has_a_ratio_and_no_interval() -> None:
    comparison = compare(result((1, [2.0])), result((1, [1.0])))
    found = comparison["levels"][0]["output_tok_s"]
    assert (
        found["ratio"] == pytest.approx(2.0)
        and found["interval"] is None
        and found["verdict"] == "no interval"
    )
    assert comparison["sentence"] == "B is 2.00 times A single-stream (no interval: one repeat)."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompts_sha256", "bb"),
        ("max_tokens", 64),
        ("api", "completions"),
        ("temperature", 1.0),
        ("seed", 1),
        ("ignore_eos", True),
        ("requests", 2),
    ],
)
def test_unlike_loads_are_refused_with_the_difference(name: str, value: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        compare(result((1, [1.0, 1.1])), result((1, [1.0, 1.1]), **{name: value}))
    assert name in caught.value.seen and repr(value) in caught.value.seen


def test_other_levels_are_refused() -> None:
    with pytest.raises(InvalidInput, match="concurrency is"):
        compare(result((1, [1.0])), result((1, [1.0]), (4, [1.0])))


def test_other_metrics_are_refused() -> None:
    other = {**result((1, [1.0])), "metric_schema": 2}
    with pytest.raises(InvalidInput, match="metric_schema"):
        compare(result((1, [1.0])), other)


def test_missing_figure_gives_no_ratio_and_says_whose() -> None:
    a, b = result((1, [1.0, 1.1])), result((1, [1.0, 1.1]))
    b["levels"][0]["repeats"][1]["output_tok_s"] = None
    comparison = compare(a, b)
    assert comparison["levels"][0]["output_tok_s"]["reason"] == "missing in a repeat of B"
    assert "nothing can be said single-stream" in comparison["sentence"]


def test_share_of_equal_outputs_counts_what_succeeded_on_both_sides() -> None:
    a, b = result((1, [1.0, 1.0])), result((1, [1.0, 1.0]))
    for side, hashes in ((a, [["x", "y", "z", None]] * 2), (b, [["x", "q", "z", "w"], ["x", "y", "z", "w"]])):
        for part, of in zip(side["levels"][0]["repeats"], hashes, strict=True):
            part["output_hashes"] = of
    equal = compare(a, b)["levels"][0]["outputs_equal"]
    assert (equal["same"], equal["of"]) == (5, 6)
    assert (equal["a_with_itself"], equal["b_with_itself"]) == (1.0, 0.75)


def test_sampled_outputs_are_not_expected_to_agree() -> None:
    sampled = result((1, [1.0, 1.1]), temperature=0.7)
    equal = compare(sampled, sampled)["levels"][0]["outputs_equal"]
    assert equal["share"] is None and "greedy" in equal["reason"]


def test_acceptance_of_each_side() -> None:
    a, b = result((1, [1.0, 1.1])), result((1, [1.0, 1.1]))
    for part in b["levels"][0]["repeats"]:
        part["acceptance"] = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 9}
    acceptance = compare(a, b)["levels"][0]["acceptance"]
    assert acceptance["a"] is None and acceptance["b"]["length"] == 1.9


def test_caveats_travel_with_the_ratio() -> None:
    a, b = result((1, [1.0, 1.1])), copy.deepcopy(result((1, [1.0, 1.1]), cache_salt=True))
    b["server"]["model"] = "other"
    b["warnings"] = ["it had other work"]
    first = b["levels"][0]["repeats"][0]
    first["requests"] = {"sent": 4, "ok": 3, "failed": 1, "reasons": {}}
    first["validity"] = {"valid": False, "reasons": ["the client was slow"]}
    first["output_tokens"] = 50
    told = "\n".join(compare(a, b)["caveats"])
    assert "m and other" in told
    assert "only one side kept its repeats out of the prefix cache" in told
    assert "B: it had other work" in told
    assert "B, repeat 1 at 1: 1 of 4 requests failed" in told
    assert "B, repeat 1 at 1: the client was slow" in told
    assert "differ in length: 100.0 tokens a repeat in A, 75.0 in B" in told


def test_two_servers_one_twice_as_fast(measure: Measure) -> None:
    results = []
    for pause_s in (0.02, 0.01):
        with serving(Script(chunks=(1,) * 10, pause_s=pause_s)) as server:
            results.append(measure(server.url, requests=3, repeats=3, concurrency=(1, 3)))
    comparison = compare(*results)
    for level in comparison["levels"]:
        assert 1.1 < level["output_tok_s"]["ratio"] < 4.0
        assert level["outputs_equal"] == {
            "share": 1.0, "same": 9, "of": 9, "reason": None, "a_with_itself": 1.0, "b_with_itself": 1.0
        }  # fmt: skip
