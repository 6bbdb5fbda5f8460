"""Whole benchmarks against a scripted server on loopback: what is sent, what is counted, what is refused."""

from __future__ import annotations

import json
import socket
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from changeover.bench.params import BenchParams
from changeover.bench.records import RequestRecords
from changeover.bench.run import bench
from changeover.machine.errors import ChangeoverError, InvalidInput
from changeover.machine.progress import Progress
from changeover.states.prompts import is_held_out
from tests.bench.conftest import Measure, only_repeat
from tests.bench.mock_server import Script, serving


def asked(bodies: list[dict[str, Any]]) -> list[str]:
    return [body["messages"][0]["content"] for body in bodies]


def test_sglang_24254_early_stop_is_counted_as_the_server_counted(measure: Measure) -> None:
    """The server stops at 16 of 512 tokens, 10 ms apart; dividing by 512 says 0.29 ms a token."""
    with serving(Script(chunks=(1,) * 16, pause_s=0.01)) as server:
        repeat = only_repeat(measure(server.url, max_tokens=512, requests=2))
    assert server.bodies[0]["max_tokens"] == 512
    assert repeat["output_tokens"] == 32
    assert repeat["tpot_s"]["mean"] > 0.005


def test_usage_is_always_asked_for(measure: Measure) -> None:
    with serving(Script()) as server:
        measure(server.url)
    assert all(body["stream"] and body["stream_options"]["include_usage"] for body in server.bodies)


def test_usage_that_does_not_come_is_null_with_a_reason(measure: Measure) -> None:
    with serving(Script(usage=False, usage_in_chunks=False)) as server:
        repeat = only_repeat(measure(server.url))
    assert repeat["output_tok_s"] is None and repeat["tpot_s"] is None
    assert repeat["missing"]["output_tok_s"] == "4 of 4 answers came without usage"
    assert repeat["requests"]["ok"] == 4 and repeat["ttft_s"]["n"] == 4


def test_guidellm_526_first_request_is_sent_at_once(measure: Measure) -> None:
    with serving(Script()) as server:
        result = measure(server.url, requests=1, repeats=5)
    lags = [repeat["client"]["sched_lag_s"]["max"] for repeat in result["levels"][0]["repeats"]]
    assert min(lags) < 0.05  # the best of five: a busy machine may delay any one


def test_vllm_54227_warm_up_never_sends_a_measured_prompt(measure: Measure) -> None:
    with serving(Script()) as server:
        result = measure(server.url, concurrency=(1, 4), warmup=3, requests=6, repeats=2)
    warm, measured = asked(server.bodies[:6]), asked(server.bodies[6:])
    assert set(warm) == {"question 17", "question 18", "question 19"}
    assert set(measured) == {f"question {n}" for n in range(6)}
    assert len(measured) == 24 and result["warm_up"]["ok"] == 6


def test_vllm_54227_repeats_are_kept_out_of_the_prefix_cache_of_vllm(measure: Measure) -> None:
    with serving(Script(), metrics=lambda: "vllm:num_requests_running 0\n") as server:
        result = measure(server.url, repeats=2)
    salts = [body["cache_salt"] for body in server.bodies]
    assert len(set(salts)) == 8
    assert all(
        len(salt) <= 128 and not set(salt) & set("@/\\\0") for salt in salts
    )  # vLLM 0.32 refuses others
    assert asked(server.bodies[:4]) == asked(server.bodies[4:])
    assert result["server"]["engine"] == "vllm" and result["load"]["cache_salt"]


def test_the_acceptance_of_sglang_is_what_its_answers_say(measure: Measure) -> None:
    details = {"spec_verify_ct": 4, "spec_num_proposed_drafts": 12, "spec_num_correct_drafts": 6}
    script = Script(sglext={"spec_tokens_details": details})
    with serving(script, metrics=lambda: "sglang:spec_accept_length 9\n") as server:
        result = measure(server.url, repeats=1)
    assert all(body["return_spec_tokens_details"] for body in server.bodies)
    [level] = result["levels"]
    said = level["summary"]["acceptance"]
    answers = len(level["repeats"][0]["acceptance_by_request"])
    assert (said["drafts"], said["accepted_tokens"], said["length"]) == (4 * answers, 6 * answers, 2.5)


def test_vllm_54227_cached_prompt_tokens_are_a_warning(measure: Measure) -> None:
    with serving(Script(cached_tokens=6)) as server:
        result = measure(server.url)
    assert "cache_salt" not in server.bodies[0]
    assert any("86% of the prompt tokens" in warning for warning in result["warnings"])


def test_vllm_54227_repeats_much_faster_than_the_first_are_a_warning(measure: Measure) -> None:
    with serving(lambda _, number: Script(first_pause_s=0.3 if number < 2 else 0.0)) as server:
        result = measure(server.url, requests=2, repeats=2)
    assert any("prefix cache or a cold start" in warning for warning in result["warnings"])


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (Script(status=503), "HTTP 503"),
        (Script(finish="abort"), "aborted"),
        (Script(error_after=3), "error event"),
        (Script(reset_after=3), "connection lost"),
        (Script(finish=None), "cut off"),
        (Script(stall_after=3), "timeout"),
    ],
)
def test_what_fails_is_counted_as_failed(measure: Measure, script: Script, reason: str) -> None:
    with serving(lambda _, number: script if number == 1 else Script()) as server:
        repeat = only_repeat(measure(server.url, timeout_s=2.0))
    assert (repeat["requests"]["ok"], repeat["requests"]["failed"]) == (3, 1)
    assert repeat["requests"]["reasons"][reason]["count"] == 1
    assert repeat["output_tokens"] == 3 * 8
    assert repeat["output_hashes"][1] is None


def test_done_may_be_missing_when_the_answer_is_finished(measure: Measure) -> None:
    with serving(Script(done=False)) as server:
        assert only_repeat(measure(server.url))["requests"]["ok"] == 4


@pytest.mark.parametrize("level", [4, 128])
def test_marin_4357_gpustack_2324_the_asked_concurrency_is_reached_and_kept(
    measure: Measure, level: int
) -> None:
    """One harness ran one request at a time, another stopped at the connector's 100."""
    with serving(Script(), hold_until=level) as server:
        repeat = only_repeat(measure(server.url, concurrency=(level,), requests=level + 3))
    assert repeat["requests"]["ok"] == level + 3
    assert server.peak == level


def test_every_repeat_and_server_gets_the_same_prompts_in_the_same_order(measure: Measure) -> None:
    results = []
    for _ in range(2):
        with serving(Script()) as server:
            results.append(measure(server.url, repeats=2, requests=5))
        assert asked(server.bodies) == [f"question {n}" for n in range(5)] * 2
    assert results[0]["load"] == results[1]["load"]


def test_hash_of_the_prompts_follows_the_prompts(measure: Measure, prompts: Path) -> None:
    with serving(Script()) as server:
        first = measure(server.url)["load"]["prompts_sha256"]
        prompts.write_text(prompts.read_text().replace("question 3", "question three"))
        assert measure(server.url)["load"]["prompts_sha256"] != first


def test_few_prompts_are_cycled_and_said(measure: Measure) -> None:
    with serving(Script()) as server:
        result = measure(server.url, requests=25)
    assert asked(server.bodies)[20:] == asked(server.bodies)[:5]
    assert any("only 20 prompts for 25 requests" in warning for warning in result["warnings"])


def test_tokens_of_a_speculative_server_and_its_acceptance(measure: Measure) -> None:
    reads = count()

    def metrics() -> str:
        n = next(reads)  # read once to know the engine, then before and after the repeat
        return (
            f"changeover:spec_decode_num_drafts_total {100 + 10 * n}\n"
            f"changeover:spec_decode_num_draft_tokens_total {300 + 30 * n}\n"
            f"changeover:spec_decode_num_accepted_tokens_total {50 + 15 * n}\n"
        )

    with serving(Script(chunks=(4, 3, 3, 3), pause_s=0.03), metrics=metrics) as server:
        result = measure(server.url)
    repeat = only_repeat(result)
    assert result["server"]["engine"] == "embedded"
    assert server.bodies[0]["stream_options"]["continuous_usage_stats"]
    assert repeat["acceptance"]["length"] == 2.5
    assert repeat["tokens_per_chunk"] == 13 / 4
    # Three tokens a chunk: a token takes a third of a gap, and never as much as a whole one.
    gap_s = repeat["chunk_gap_s"]["mean"]
    assert gap_s / 3 * 0.999 < repeat["tpot_s"]["mean"] < gap_s


def test_acceptance_of_each_request_stands_in_its_record_and_repeat(measure: Measure, tmp_path: Path) -> None:
    counts = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 15}
    answered = 0

    def metrics() -> str:
        return "".join(
            f"changeover:spec_decode_num_{name}_total {value * answered}\n" for name, value in counts.items()
        )

    def script(_: dict[str, Any], number: int) -> Script:
        nonlocal answered
        answered = number + 1
        return Script(speculation=counts)

    with serving(script, metrics=metrics) as server:
        result = measure(server.url, requests=None, repeats=2, out=tmp_path)
    (level,) = result["levels"]
    assert [repeat["acceptance_by_request"] for repeat in level["repeats"]] == [[[10, 15]] * 20] * 2
    assert level["summary"]["acceptance"]["interval"] == [2.5, 2.5]
    lines = (tmp_path / RequestRecords.NAME).read_text().splitlines()
    assert [json.loads(line)["speculation"] for line in lines] == [counts] * 40


def test_work_for_somebody_else_is_a_warning(measure: Measure) -> None:
    with serving(Script()) as server:
        server.metrics = lambda: f"changeover:generation_tokens_total {3 * server.generated}\n"
        result = measure(server.url)
    assert any("96 tokens, 32 of them for us" in warning for warning in result["warnings"])


def test_server_where_nothing_succeeds_ends_the_benchmark(measure: Measure, tmp_path: Path) -> None:
    with (
        serving(Script(status=503)) as server,
        pytest.raises(ChangeoverError, match=r"4 x HTTP 503.*draining"),
    ):
        measure(server.url, repeats=3, out=tmp_path / "out")
    assert len(server.bodies) == 4
    assert not (tmp_path / "out" / RequestRecords.NAME).exists()


def test_auto_tuning_vllm_68_server_that_dies_is_noticed_at_once(measure: Measure) -> None:
    stop = threading.Event()

    def die_at_the_third(_: dict[str, Any], number: int) -> Script:
        if number == 2:
            stop.set()
        return Script(reset_after=0) if stop.is_set() else Script()

    with serving(die_at_the_third) as server, pytest.raises(ChangeoverError, match="connection lost"):
        measure(server.url, requests=2, repeats=3, timeout_s=600.0)


def test_server_that_is_not_there(measure: Measure) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening
        with pytest.raises(ChangeoverError, match="a server at"):
            measure(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ChangeoverError, match="4 x not sent"):
            measure(f"http://127.0.0.1:{taken.getsockname()[1]}", model="m")


def test_several_models_must_be_chosen_from(measure: Measure) -> None:
    with serving(Script(), models=("a", "b")) as server:
        with pytest.raises(InvalidInput, match="a, b"):
            measure(server.url)
        assert measure(server.url, model="b")["server"]["model"] == "b"
    assert server.bodies[0]["model"] == "b"


def test_secrets_in_the_address_stay_out_of_the_result(measure: Measure) -> None:
    with serving(Script()) as server:
        result = measure(server.url.replace("//", "//alice:hunter2@") + "/v1/")
    assert result["server"]["url"] == server.url
    assert "hunter2" not in json.dumps(result)


def test_request_records_are_strict_json_one_line_a_request(measure: Measure, tmp_path: Path) -> None:
    with serving(lambda _, number: Script(status=500) if number == 0 else Script()) as server:
        result = measure(server.url, repeats=2, out=tmp_path)
    text = (tmp_path / RequestRecords.NAME).read_text()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert [(line["repeat"], line["index"]) for line in lines] == [(r, i) for r in (1, 2) for i in range(4)]
    assert [line["ok"] for line in lines] == [False] + [True] * 7
    assert lines[0]["reason"] == "HTTP 500" and lines[1]["chunk_output_tokens"] == list(range(1, 9))
    assert [path.name for path in tmp_path.iterdir()].count(f"{RequestRecords.NAME}.partial") == 0
    json.dumps(result, allow_nan=False)


def test_only_held_out_prompts(measure: Measure) -> None:
    with serving(Script()) as server:
        measure(server.url, requests=3, held_out=0.5)
    kept = [f"question {n}" for n in range(20) if is_held_out(f"p{n}", 0.5)]
    assert asked(server.bodies) == kept[:3]


def test_every_prompt_that_is_left_once(measure: Measure) -> None:
    with serving(Script()) as server:
        result = measure(server.url, requests=None, warmup=2)
    assert asked(server.bodies) == [f"question {n}" for n in (18, 19, *range(18))]
    assert result["load"]["requests"] == result["load"]["distinct_prompts"] == 18
    assert not any("more than once" in warning for warning in result["warnings"])


def test_every_held_out_prompt_without_a_warm_up(measure: Measure) -> None:
    with serving(Script()) as server:
        result = measure(server.url, requests=None, warmup=0, held_out=0.5)
    assert asked(server.bodies) == [f"question {n}" for n in range(20) if is_held_out(f"p{n}", 0.5)]
    assert result["warm_up"] == {"sent": 0, "ok": 0, "failed": 0, "reasons": {}}


def test_plain_text_through_both_apis(tmp_path: Path, measure: Measure, prompts: Path) -> None:
    prompts.write_text("".join(json.dumps({"text": f"once {n}"}) + "\n" for n in range(4)))
    with serving(Script()) as server:
        assert only_repeat(measure(server.url, api="completions"))["output_tokens"] == 32
        assert only_repeat(measure(server.url, api="chat"))["output_tokens"] == 32
    assert server.bodies[0]["prompt"] == "once 0"
    assert server.bodies[4]["messages"] == [{"role": "user", "content": "once 0"}]


def test_chat_prompts_cannot_go_through_the_completions_api(measure: Measure) -> None:
    with serving(Script()) as server, pytest.raises(InvalidInput, match="plain text"):
        measure(server.url, api="completions")


def test_warm_up_and_measured_prompts_must_fit_in_the_file(measure: Measure) -> None:
    with serving(Script()) as server, pytest.raises(InvalidInput, match="at least 21 prompts"):
        measure(server.url, warmup=20)


def test_progress_ends_each_stage(prompts: Path) -> None:
    seen: list[Progress] = []
    with serving(Script()) as server:
        params = BenchParams(server.url, prompts, concurrency=(2,), requests=3, repeats=2, warmup=1)
        bench(params, seen.append)
    ends = [(progress.stage, progress.total) for progress in seen if progress.done == progress.total]
    assert ends == [("warm-up at 2", 1), ("repeat 1 of 2 at 2", 3), ("repeat 2 of 2 at 2", 3)]


@pytest.mark.parametrize(
    "changes",
    [{"concurrency": ()}, {"concurrency": (1, 1)}, {"concurrency": (0,)}, {"requests": 0}, {"repeats": 0},
     {"warmup": -1}, {"max_tokens": 0}, {"api": "embeddings"}],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        BenchParams("http://127.0.0.1:1", Path("x"), **changes)


def test_parameters_of_a_job() -> None:
    params = BenchParams.from_json(
        {"url": "http://h:1", "prompts": "p.jsonl", "concurrency": [1, 2], "out": "o"}
    )
    assert params == BenchParams("http://h:1", Path("p.jsonl"), concurrency=(1, 2), out=Path("o"))
    with pytest.raises(InvalidInput, match="strange"):
        BenchParams.from_json({"url": "http://h:1", "prompts": "p", "strange": 1})


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_address_that_is_none(measure: Measure, url: str) -> None:
    with pytest.raises(InvalidInput, match="address such as"):
        measure(url)
