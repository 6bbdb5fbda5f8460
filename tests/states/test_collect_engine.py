"""Collecting from the embedded server: real states, judged by the model's own output layer; killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from changeover.states.collect import collect
from changeover.states.errors import CollectFailed
from changeover.states.lines import read_lines
from changeover.states.params import CollectParams
from changeover.states.store import StatesReader
from changeover.states.verify import verify
from tests.engine_fixtures import start_embedded
from tests.tiny_model import HIDDEN, LAYERS, VOCAB

BOUNDARIES = (2, 4, 5)
LAPTOP_PROMPTS = Path(__file__).parents[2] / "examples/prompts/laptop.jsonl"
KILLED_JOB = """
import json, sys
from changeover.states.collect import collect
from changeover.states.params import CollectParams
collect(CollectParams.from_json(json.loads(sys.argv[1])), lambda p: print(p.stage, p.done, flush=True))
"""


def tiny_params(tmp_path: Path, url: str, model: Path, **changes: Any) -> dict[str, Any]:
    return {
        "url": url,
        "prompts": str(LAPTOP_PROMPTS),
        "out": str(tmp_path / "states"),
        "capture_dir": str(tmp_path / "staging"),
        "model_path": str(model),
        "hidden": HIDDEN,
        "layers": LAYERS,
        "vocab": VOCAB,
        "boundaries": list(BOUNDARIES),
        "max_tokens": 16,
        "disk_reserve_bytes": 0,
        **changes,
    }


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    (tmp_path / "staging").mkdir()
    return tmp_path / "staging"


@pytest.mark.engine
def test_states_of_the_embedded_server_are_the_models_own(
    tmp_path: Path, staging: Path, tiny_model_dir: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    options = ["--capture-dir", str(staging), "--aux-boundaries", ",".join(map(str, BOUNDARIES))]
    with start_embedded(tiny_model_dir, *options, log=tmp_path / "log") as server:
        result = collect(CollectParams.from_json(tiny_params(tmp_path, server.url, tiny_model_dir, limit=24)))
    assert result["samples"] + result["failed"] == 24
    assert result["probe"]["passed"] and result["probe"]["agreement"] > 0.99
    assert list(staging.iterdir()) == []
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    reader = StatesReader(tmp_path / "states")
    for position in (0, len(reader) - 1):
        sample = reader.read(position)
        with torch.no_grad():
            states = model(
                torch.from_numpy(sample.input_ids.copy())[None], output_hidden_states=True
            ).hidden_states
        for place, boundary in enumerate(BOUNDARIES):
            stored = torch.from_numpy(sample.aux[:, place].astype(np.int16)).view(torch.bfloat16).float()
            torch.testing.assert_close(stored, states[boundary][0], rtol=1 / 128, atol=1e-3)
        last = torch.from_numpy(sample.last.astype(np.int16)).view(torch.bfloat16).float()
        torch.testing.assert_close(last, states[-1][0], rtol=1 / 128, atol=1e-3)


@pytest.mark.engine
def test_kill_9_of_the_collection_and_resume(tmp_path: Path, staging: Path, tiny_model_dir: Path) -> None:
    options = ["--capture-dir", str(staging), "--aux-boundaries", ",".join(map(str, BOUNDARIES))]
    with start_embedded(tiny_model_dir, *options, log=tmp_path / "log") as server:
        params = tiny_params(tmp_path, server.url, tiny_model_dir, limit=40, concurrency=4)
        job = subprocess.Popen(
            [sys.executable, "-c", KILLED_JOB, json.dumps(params)], stdout=subprocess.PIPE, text=True
        )
        assert job.stdout is not None
        while not (line := job.stdout.readline()).startswith("collect 15"):
            assert line, "the job ended by itself"
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
        (staging / "left-by-another-client.safetensors").touch()
        result = collect(CollectParams.from_json(params))
    assert result["samples"] + result["failed"] == 40
    assert not verify(tmp_path / "states").damages
    answered = [
        line.value["id"] for line in read_lines(tmp_path / "states/answers.jsonl") if line.value is not None
    ]
    assert set(answered) == set(StatesReader(tmp_path / "states").ids)
    assert [path.name for path in staging.iterdir()] == ["left-by-another-client.safetensors"]


@pytest.mark.engine
def test_a_server_killed_in_the_middle_ends_the_collection_soon(
    tmp_path: Path, staging: Path, tiny_model_dir: Path
) -> None:
    options = ["--capture-dir", str(staging), "--aux-boundaries", ",".join(map(str, BOUNDARIES))]
    with start_embedded(tiny_model_dir, *options, log=tmp_path / "log") as server:
        params = CollectParams.from_json(
            tiny_params(tmp_path, server.url, tiny_model_dir, concurrency=4, retry_delay_s=0.01)
        )
        started = time.monotonic()

        def kill_at_ten(progress: Any) -> None:
            # two samples may be stored between two reports
            if progress.stage == "collect" and progress.done >= 10:
                server.process.kill()

        with pytest.raises(CollectFailed, match="failures in a row"):
            collect(params, kill_at_ten)
        assert time.monotonic() - started < 120
    reader = StatesReader(tmp_path / "states")
    assert 5 <= len(reader) <= 20
    assert not verify(tmp_path / "states").damages and not reader.manifest.sealed


@pytest.mark.engine
@pytest.mark.slow
def test_the_real_models_answers(tmp_path: Path, staging: Path, model_dir: Path) -> None:
    asked = [{"id": "france", "prompt": "What is the capital of France?"}]
    shipped = [json.loads(line) for line in LAPTOP_PROMPTS.read_text().splitlines()[:5]]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps(line) for line in asked + shipped))
    facts = {
        "prompts": str(prompts),
        "hidden": 576,
        "layers": 30,
        "vocab": 49152,
        "boundaries": [2, 15, 27],
        "max_tokens": 24,
    }
    with start_embedded(model_dir, "--capture-dir", str(staging), log=tmp_path / "log") as server:
        result = collect(CollectParams.from_json(tiny_params(tmp_path, server.url, model_dir, **facts)))
    assert (result["samples"], result["failed"]) == (6, 0)
    assert result["probe"]["agreement"] > 0.99
    answers = {
        line.value["id"]: line.value for line in read_lines(tmp_path / "states/answers.jsonl") if line.value
    }
    assert "Paris" in answers["france"]["text"]
