"""The real small model: drafts change no token, company changes no answer, captured rows are the model's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine_fixtures import RunningServer, start_embedded
from tests.engines.drafters import write_drafter

pytestmark = [pytest.mark.engine, pytest.mark.slow]

QUESTIONS = (
    "What is the capital of France?",
    "Count from one to twenty in words, separated by commas.",
    "Write the word yes ten times.",
)
TOKENS = 48


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("real")
    with start_embedded(
        model_dir, "--capture-dir", str(folder), "--aux-boundaries", "0,15,30", log=folder / "log"
    ) as running:
        yield running


def ask(server: RunningServer, question: str, **more: Any) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": TOKENS,
        **more,
    }
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    return answer


def ask_all_at_once(server: RunningServer) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = [{}] * len(QUESTIONS)

    def one(index: int) -> None:
        answers[index] = ask(server, QUESTIONS[index])

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(QUESTIONS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def essence(answer: dict[str, Any]) -> tuple[str, str, int]:
    choice = answer["choices"][0]
    return choice["message"]["content"], choice["finish_reason"], answer["usage"]["completion_tokens"]


@pytest.fixture(scope="module")
def alone(server: RunningServer) -> list[tuple[str, str, int]]:
    return [essence(ask(server, question)) for question in QUESTIONS]


def test_it_knows_the_capital_of_france(alone: list[tuple[str, str, int]]) -> None:
    assert "Paris" in alone[0][0]
    assert alone[0][1] == "stop"


def test_company_changes_no_answer(server: RunningServer, alone: list[tuple[str, str, int]]) -> None:
    assert [essence(answer) for answer in ask_all_at_once(server)] == alone


def test_captured_rows_are_hugging_faces(server: RunningServer, model_dir: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    told = ask(server, QUESTIONS[1], capture={"path": "real.safetensors"})["capture"]
    tensors = load_file(server.log.parent / "real.safetensors")
    ids = tensors["input_ids"]
    assert told["tokens"] == len(ids) and tensors["aux"].shape == (len(ids), 3, 576)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        output = model(ids[None], output_hidden_states=True)
        own = model.lm_head(tensors["last"].float()).argmax(-1)
        renormed = model.model.norm(tensors["aux"][:, 2].float())
    states = output.hidden_states

    def error(mine: Any, theirs: Any) -> float:
        return float((mine.float() - theirs).norm() / theirs.norm())

    assert error(tensors["aux"][:, 0], states[0][0]) < 0.004  # bf16 keeps 8 bits
    assert error(tensors["aux"][:, 1], states[15][0]) < 0.004
    assert error(renormed, states[30][0]) < 0.006
    assert error(tensors["last"], states[30][0]) < 0.004
    # the probe that a collection makes: the stored last state gives the engine's own greedy tokens
    generated = own[told["prompt_tokens"] - 1 :].tolist()
    assert generated == told["output_token_ids"]


@pytest.mark.parametrize("double", ["random", "frequent"])
def test_a_drafter_changes_no_token(
    model_dir: Path, alone: list[tuple[str, str, int]], tmp_path: Path, double: str
) -> None:
    from transformers import AutoTokenizer

    only = None
    if double == "frequent":  # every draft is " yes", which the third answer is full of
        ids = AutoTokenizer.from_pretrained(model_dir).encode(alone[2][0], add_special_tokens=False)
        only = max(set(ids), key=ids.count)
    drafter = write_drafter(tmp_path / "drafter", model_dir, only_token=only)
    with start_embedded(model_dir, "--drafter", str(drafter), log=tmp_path / "log") as server:
        assert [essence(answer) for answer in ask_all_at_once(server)] == alone
        assert server.metric("spec_decode_num_drafts_total") > 10
        if double == "frequent":
            assert server.metric("spec_decode_num_accepted_tokens_total") > 0
