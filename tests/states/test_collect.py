"""Collecting from a server that behaves, from one that does not, and after a stop."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from changeover.machine.errors import InvalidInput
from changeover.machine.progress import Progress
from changeover.states.ask import ByteBudget
from changeover.states.collect import collect, largest_capture_bytes
from changeover.states.errors import CollectFailed, StoreFull
from changeover.states.lines import read_lines
from changeover.states.params import CollectParams
from changeover.states.prompts import is_held_out, read_prompts
from changeover.states.staging import Staging, capture_name
from changeover.states.store import StatesReader, StatesWriter
from tests.states.fake_server import (
    BOUNDARIES,
    HIDDEN,
    LAYERS,
    VOCAB,
    FakeServer,
    output_vectors,
    serving,
    write_model,
)


@pytest.fixture
def server(tmp_path: Path) -> FakeServer:
    (tmp_path / "staging").mkdir()
    return FakeServer(tmp_path / "staging")


@pytest.fixture
def params(tmp_path: Path, server: FakeServer) -> Iterator[CollectParams]:
    with serving(server) as url:
        yield CollectParams(
            url=url,
            prompts=tmp_path / "prompts.txt",
            out=tmp_path / "states",
            capture_dir=server.capture_dir,
            model_path=write_model(tmp_path / "model"),
            hidden=HIDDEN,
            layers=LAYERS,
            vocab=VOCAB,
            boundaries=BOUNDARIES,
            max_tokens=12,
            concurrency=4,
            disk_reserve_bytes=0,
            timeout_s=20,
            retry_delay_s=0.001,
        )


def changed(params: CollectParams, **changes: Any) -> CollectParams:
    return CollectParams(**{**params.__dict__, **changes})


def ask_for(params: CollectParams, *texts: str) -> None:
    params.prompts.write_text("\n".join(texts) + "\n")


def answers(params: CollectParams) -> list[dict[str, Any]]:
    return [line.value for line in read_lines(params.out / "answers.jsonl") if line.value is not None]


def failures(params: CollectParams) -> dict[str, dict[str, Any]]:
    text_of = {prompt.id: prompt.text for prompt in read_prompts(params.prompts)}
    read = [line.value for line in read_lines(params.out / "failures.jsonl") if line.value is not None]
    return {str(text_of[value["id"]]): value for value in read}


def test_every_prompt_is_answered_stored_and_sealed(params: CollectParams, server: FakeServer) -> None:
    texts = [f"question number {i}" for i in range(40)]
    ask_for(params, *texts)
    seen: list[Progress] = []
    result = collect(params, seen.append)
    assert (result["samples"], result["failed"], result["asked"]) == (40, 0, 40)
    reader = StatesReader(params.out)
    assert reader.manifest.sealed and reader.manifest.probe["passed"]
    assert reader.manifest.gate["samples"] == 40
    assert reader.manifest.boundaries == BOUNDARIES
    assert sorted(reader.ids) == sorted(prompt.id for prompt in read_prompts(params.prompts))
    assert {answer["id"] for answer in answers(params)} == set(reader.ids)
    assert result["tokens"] == sum(reader.entry(i).tokens for i in range(40))
    assert list(server.capture_dir.iterdir()) == []
    assert server.most_at_once <= 4
    stages = [progress.stage for progress in seen]
    assert stages[0] == "collect" and "probe" in stages and stages[-1] == "verify"
    assert [p.done for p in seen if p.stage == "collect"][-1] == 40
    json.dumps(result, allow_nan=False)


def test_the_rows_are_prompt_and_answer_without_the_last_token(params: CollectParams) -> None:
    ask_for(params, "hello there", "good day")
    collect(params)
    reader = StatesReader(params.out)
    vectors = output_vectors()
    for answer in answers(params):
        sample = reader.read(reader.position(answer["id"]))
        generated = answer["output_token_ids"]
        assert sample.tokens == answer["prompt_tokens"] + len(generated) - 1
        assert sample.input_ids[answer["prompt_tokens"] :].tolist() == generated[:-1]
        assert sample.loss_mask.tolist() == [0] * answer["prompt_tokens"] + [1] * (len(generated) - 1)
        last = (sample.last.astype("uint32") << 16).view("float32")
        following = [*sample.input_ids[1:].tolist(), generated[-1]]
        assert (last @ vectors.T).argmax(axis=1).tolist() == following
        assert answer["held_out"] == is_held_out(answer["id"], params.held_out_fraction)
        assert answer["text"].startswith("re: ")


FAULTS = {
    "poison": ("refused", "prompt too long", 1),
    "hang up": ("transport", "Disconnected", 3),
    "not a number": ("invalid", "NaN or infinity in aux", 1),
    "zero row": ("invalid", "all zero", 1),
    "other layers": ("invalid", "boundaries", 1),
    "other ids": ("invalid", "not those of the answer", 1),
    "chunked": ("invalid", "aux of shape", 1),
    "before the norm": ("invalid", "pre-norm", 1),
    "truncated": ("invalid", "does not lie in the file", 1),
    "no file": ("invalid", "No such file", 1),
    "short": ("invalid", "1 token", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_poison_sample_is_listed_with_its_reason_and_costs_no_other(
    params: CollectParams, server: FakeServer, fault: str
) -> None:
    ask_for(params, *[f"good {i}" for i in range(12)], f"a {fault} prompt")
    result = collect(params)
    kind, reason, attempts = FAULTS[fault]
    assert (result["samples"], result["failed"]) == (12, 1)
    failure = failures(params)[f"a {fault} prompt"]
    assert (failure["kind"], failure["attempts"]) == (kind, attempts)
    assert reason in failure["reason"]
    assert server.asked[f"a {fault} prompt"] == attempts
    assert list(server.capture_dir.iterdir()) == []
    again = collect(params)
    asked_again = 3 if kind == "transport" else 0
    assert server.asked[f"a {fault} prompt"] == attempts + asked_again
    assert again["samples"] == 12


def test_what_may_pass_is_tried_again(params: CollectParams, server: FakeServer) -> None:
    ask_for(params, "flaky", "steady")
    assert collect(params)["samples"] == 2
    assert (server.asked["flaky"], server.asked["steady"]) == (3, 1)
    assert not failures(params)


def test_a_server_that_goes_away_ends_the_collection_and_it_resumes(
    params: CollectParams, server: FakeServer
) -> None:
    ask_for(params, *[f"question {i}" for i in range(60)])
    server.die_after = 20
    with pytest.raises(CollectFailed, match="503"):
        collect(params)
    assert len(StatesReader(params.out)) == 20
    assert not StatesReader(params.out).manifest.sealed
    server.die_after = None
    result = collect(params)
    assert (result["samples"], result["samples_before"], result["failed"]) == (60, 20, 0)
    assert set(server.answered.values()) == {1}, "what is stored is not asked for again"
    assert StatesReader(params.out).manifest.sealed


def test_more_prompts_open_a_sealed_folder_again(params: CollectParams, server: FakeServer) -> None:
    ask_for(params, "one", "two")
    collect(params)
    ask_for(params, "one", "two", "three")
    result = collect(params)
    assert (result["samples"], result["asked"]) == (3, 1)
    assert StatesReader(params.out).manifest.gate["samples"] == 3
    assert server.asked == {"one": 1, "two": 1, "three": 1}


def test_states_of_another_kind_do_not_join(params: CollectParams) -> None:
    ask_for(params, "one")
    collect(params)
    with pytest.raises(InvalidInput, match="model_sha256"):
        collect(changed(params, model_sha256="0" * 64))


def test_shifted_rows_do_not_pass_the_probe(params: CollectParams) -> None:
    ask_for(params, *[f"shifted {i}" for i in range(10)])
    with pytest.raises(CollectFailed, match="next token"):
        collect(params)
    manifest = StatesReader(params.out).manifest
    assert not manifest.sealed
    assert manifest.probe["passed"] is False and manifest.probe["agreement"] < 0.5


def test_another_models_head_does_not_pass_the_probe(params: CollectParams) -> None:
    save_file({"lm_head.weight": output_vectors()[::-1].copy()}, params.model_path / "model.safetensors")
    ask_for(params, *[f"question {i}" for i in range(10)])
    with pytest.raises(CollectFailed, match="next token"):
        collect(params)


def test_too_many_failures_keep_the_gate_shut(params: CollectParams) -> None:
    ask_for(params, "good 1", "good 2", "good 3", "poison")
    with pytest.raises(CollectFailed, match="1 of 4 samples failed"):
        collect(params)
    assert not StatesReader(params.out).manifest.sealed


def test_a_server_that_captures_nothing_is_not_asked_for_ever(
    params: CollectParams, server: FakeServer
) -> None:
    ask_for(params, *[f"poison {i}" for i in range(500)])
    with pytest.raises(CollectFailed, match="8 failures in a row"):
        collect(params)
    assert sum(server.asked.values()) < 20


def test_the_disk_reserve_stops_cleanly_and_resumes(
    params: CollectParams, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_for(params, *[f"question {i}" for i in range(30)])
    left = iter([10**9] * 11)

    class Usage:
        def __init__(self) -> None:
            self.free = next(left, 1000)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: Usage())
        with pytest.raises(StoreFull, match="1000 bytes free"):
            collect(changed(params, disk_reserve_bytes=10**6))
    assert len(StatesReader(params.out)) == 11
    result = collect(changed(params, disk_reserve_bytes=0))
    assert (result["samples"], result["samples_before"]) == (30, 11)
    # The server may still have been writing for requests that the stop cut off; the resumed run took those
    # files.
    assert list(server.capture_dir.iterdir()) == []


def test_what_a_crash_left_in_staging_is_swept_and_only_that(
    params: CollectParams, server: FakeServer
) -> None:
    ask_for(params, "one", "two")
    ours = capture_name(read_prompts(params.prompts)[0].id)
    (server.capture_dir / ours).write_bytes(b"left by a crash")
    (server.capture_dir / f".{ours}.4711.tmp").write_bytes(b"left by a killed server")
    (server.capture_dir / "somebody-elses.safetensors").write_bytes(b"of another client")
    collect(params)
    assert [path.name for path in server.capture_dir.iterdir()] == ["somebody-elses.safetensors"]


def test_staging_stays_within_its_budget(params: CollectParams, server: FakeServer) -> None:
    ask_for(params, *[f"question {i}" for i in range(24)])
    one = largest_capture_bytes(read_prompts(params.prompts)[0], params)
    server.delay_s = 0.02
    collect(changed(params, concurrency=16, staging_budget_bytes=3 * one + 1000))
    assert 1 < server.most_at_once <= 3
    assert server.most_staged_bytes <= 3 * one + 1000


def test_a_request_larger_than_the_budget_goes_alone() -> None:
    async def scenario() -> list[str]:
        budget, order = ByteBudget(100), []

        async def take(name: str, size: int) -> None:
            async with budget.hold(size):
                order.append(f"{name}+{budget.taken_bytes}")
                await asyncio.sleep(0)
                order.append(f"{name}-")

        await asyncio.wait_for(asyncio.gather(take("a", 60), take("large", 500), take("b", 40)), 10)
        return order

    order = asyncio.run(scenario())
    assert order.index("large-") == order.index("large+500") + 1
    assert "b+100" in order


def test_the_gate_needs_staging_empty(tmp_path: Path) -> None:
    (tmp_path / capture_name("s")).touch()
    staging = Staging(tmp_path, ["s", "t"])
    assert [path.name for path in staging.files()] == [capture_name("s")]


def test_parameters_of_a_job_are_checked(params: CollectParams) -> None:
    text = {name: str(value) if isinstance(value, Path) else value for name, value in params.__dict__.items()}
    assert CollectParams.from_json(json.loads(json.dumps(text))) == params
    with pytest.raises(InvalidInput, match="promts"):
        CollectParams.from_json({**text, "promts": "x"})
    with pytest.raises(InvalidInput, match="no vocab"):
        CollectParams.from_json({name: value for name, value in text.items() if name != "vocab"})
    with pytest.raises(InvalidInput, match="rising"):
        changed(params, boundaries=(4, 2, 5))
    with pytest.raises(InvalidInput, match="max_tokens"):
        changed(params, max_tokens=1)


def test_a_second_collection_into_the_same_folder_is_refused(params: CollectParams) -> None:
    ask_for(params, "one")
    with StatesWriter.open(params.out, params.manifest()), pytest.raises(Exception, match="no other writer"):
        collect(params)
