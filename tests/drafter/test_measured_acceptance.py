"""Simulated acceptance against the embedded server's own counters, on the states that it captured itself."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from changeover.drafter.evaluate import Judge, frozen_for
from changeover.drafter.export import load_drafter
from changeover.drafter.params import TrainParams
from changeover.drafter.replay import acceptance_length
from changeover.drafter.target import read_target_facts, read_target_weights
from changeover.drafter.train import train
from changeover.machine.progress import ignore_progress
from changeover.states.collect import collect
from changeover.states.params import CollectParams
from changeover.states.prompts import read_prompts
from changeover.states.store import StatesReader
from tests.engine_fixtures import start_embedded
from tests.tiny_model import HIDDEN, LAYERS, VOCAB

PROMPTS = Path(__file__).parents[2] / "examples/prompts/laptop.jsonl"
BOUNDARIES = (2, 4, 5)
DRAFT_TOKENS, MAX_TOKENS, SAMPLES = 3, 32, 24


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> str:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200, text
        return text
    finally:
        connection.close()


def counter(metrics: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name))


@pytest.mark.engine
def test_simulated_acceptance_is_what_the_server_measures(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "staging").mkdir()
    options = ["--capture-dir", str(tmp_path / "staging"), "--aux-boundaries", ",".join(map(str, BOUNDARIES))]
    params = {
        "prompts": PROMPTS,
        "out": tmp_path / "states",
        "capture_dir": tmp_path / "staging",
        "model_path": tiny_model_dir,
        "hidden": HIDDEN,
        "layers": LAYERS,
        "vocab": VOCAB,
        "boundaries": BOUNDARIES,
        "max_tokens": MAX_TOKENS,
        "limit": SAMPLES,
        "disk_reserve_bytes": 0,
    }
    with start_embedded(tiny_model_dir, *options, log=tmp_path / "capture.log") as server:
        collect(CollectParams.from_json({**params, "url": server.url}))
    result = train(
        TrainParams(
            states=tmp_path / "states",
            model=tiny_model_dir,
            out=tmp_path / "training",
            epochs=16,
            learning_rate=2e-3,
            batch_tokens=512,
            draft_vocab_size=VOCAB,
            device="cpu",
            threads=2,
        ),
        ignore_progress,
    )

    reader = StatesReader(tmp_path / "states")
    facts = read_target_facts(tiny_model_dir)
    target = read_target_weights(tiny_model_dir, dtype=torch.float32, device="cpu")
    drafter, vocabulary = load_drafter(Path(result["drafter"]), dtype=torch.float32, device="cpu")
    judge = Judge(list(reader), target, vocabulary, facts.eos_token_ids, DRAFT_TOKENS)
    replays = judge.replays(drafter, frozen_for(target, vocabulary))

    stored = set(reader.ids)
    options = ["--drafter", result["drafter"], "--draft-tokens", str(DRAFT_TOKENS)]
    with start_embedded(tiny_model_dir, *options, log=tmp_path / "speculative.log") as server:
        for prompt in read_prompts(PROMPTS, SAMPLES):
            if prompt.id in stored:
                messages = [{"role": one.role, "content": one.content} for one in prompt.messages or ()]
                body = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}
                ask(server.url, "/v1/chat/completions", body)
        metrics = ask(server.url, "/metrics")
    drafts = counter(metrics, "changeover:spec_decode_num_drafts_total")
    accepted = counter(metrics, "changeover:spec_decode_num_accepted_tokens_total")
    assert counter(metrics, "changeover:generation_tokens_total") == sum(one.generated for one in replays)
    assert accepted > 60, "without acceptance the comparison shows nothing"
    assert acceptance_length(replays) == pytest.approx(1 + accepted / drafts, rel=0.03)
