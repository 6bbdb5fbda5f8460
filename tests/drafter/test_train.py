"""A whole training on tiny states: it learns, it can be killed at any step, and what it writes loads."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from changeover.drafter.checkpoint import newest_checkpoint
from changeover.drafter.evaluate import evaluate
from changeover.drafter.optimizer import learning_rate_factor
from changeover.drafter.params import TrainParams
from changeover.drafter.train import train
from changeover.machine.errors import InvalidInput
from changeover.machine.progress import Progress, ignore_progress
from tests.drafter.samples import make_target, write_states, write_target_folder

CHILD = """
import os, signal, sys, json, pathlib
import torch
torch.set_num_threads(1)
from changeover.drafter.params import TrainParams
from changeover.drafter.train import train
params = TrainParams.from_json(json.loads(sys.argv[1]))
sign, at = int(sys.argv[2]), int(sys.argv[3])
def show(progress):
    if progress.done == at:
        os.kill(os.getpid(), sign)
train(params, show)
"""


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("ground")
    return {
        "states": str(write_states(root / "states")),
        "model": str(write_target_folder(root / "target", make_target())),
    }


def params_of(ground: dict[str, str], out: Path, **more: object) -> dict[str, object]:
    base: dict[str, object] = {
        **ground,
        "out": str(out),
        "epochs": 6,
        "learning_rate": 1e-2,
        "batch_tokens": 60,
        "ttt_steps": 3,
        "draft_vocab_size": 60,
        "device": "cpu",
        "threads": 1,
        "checkpoint_every_s": 1e-9,
    }
    return {**base, **more}


def run_child(params: dict[str, object], sign: int, at: int) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", CHILD, json.dumps(params), str(int(sign)), str(at)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def finished(ground: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """An uninterrupted run and what it said of itself."""
    out = tmp_path_factory.mktemp("finished")
    seen: list[Progress] = []
    result = train(TrainParams.from_json(params_of(ground, out)), seen.append)
    return {"result": result, "progress": seen, "out": out}


def test_it_learns_and_says_so(finished: dict[str, object]) -> None:
    result = finished["result"]
    json.dumps(result, allow_nan=False)
    assert result["loss_curve"][-1][1] < 0.5 * result["loss_curve"][0][1]
    assert result["acceptance_length"] > max(1.6, result["held_out_curve"][0][1] + 0.2)
    assert result["held_out_curve"][0][0] == 0 and result["held_out_curve"][-1][0] == result["steps"]
    low, high = result["evaluation"]["ci95"]
    assert low <= result["acceptance_length"] <= high
    assert 0 < result["held_out_samples"] < result["train_samples"]
    steps = [p.done for p in finished["progress"]]
    assert steps == list(range(1, result["steps"] + 1))
    assert {"loss", "tokens_per_s", "eta_s"} <= finished["progress"][-1].detail.keys()


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 7])
def test_killed_and_resumed_ends_with_the_same_bits(
    ground: dict[str, str], finished: dict[str, object], tmp_path: Path, at: int
) -> None:
    params = params_of(ground, tmp_path / "run")
    killed = run_child(params, signal.SIGKILL, at)
    assert killed.returncode == -signal.SIGKILL
    # The kill comes within step `at`'s report, before its checkpoint.
    left = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert (left.step if left else 0) == at - 1
    result = train(TrainParams.from_json(params), ignore_progress)
    weights = load_file(tmp_path / "run" / "drafter" / "model.safetensors")
    expected = load_file(Path(finished["out"]) / "drafter" / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name
    assert result["loss_curve"] == finished["result"]["loss_curve"]
    assert result["held_out_curve"] == finished["result"]["held_out_curve"]


def test_sigterm_saves_and_stops(ground: dict[str, str], tmp_path: Path) -> None:
    stopped = run_child(params_of(ground, tmp_path / "run", checkpoint_every_s=1e6), signal.SIGTERM, 4)
    assert stopped.returncode == 1 and "TrainingStopped" in stopped.stderr
    left = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert left is not None and left.step == 4
    assert not (tmp_path / "run" / "drafter").exists()


def test_another_training_is_not_resumed(ground: dict[str, str], finished: dict[str, object]) -> None:
    other = params_of(ground, Path(finished["out"]), learning_rate=1e-4)
    with pytest.raises(InvalidInput, match="learning_rate"):
        train(TrainParams.from_json(other), ignore_progress)


def test_evaluation_of_the_exported_folder_agrees_with_the_trainer(
    ground: dict[str, str], finished: dict[str, object]
) -> None:
    """The target's dtype here is float32, so that export loses nothing but the folding of the scale."""
    result = evaluate(
        states=Path(ground["states"]),
        model=Path(ground["model"]),
        drafter=Path(finished["out"]) / "drafter",
        draft_tokens=3,
        on_progress=ignore_progress,
    )
    assert result["acceptance_length"] == pytest.approx(finished["result"]["acceptance_length"], abs=0.02)
    assert result["verify_steps"] > 0 and result["samples"] == finished["result"]["held_out_samples"]


def test_a_changed_bit_in_the_newest_checkpoint_falls_back_to_the_one_before(
    ground: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert run_child(params_of(ground, out), signal.SIGKILL, 5).returncode == -signal.SIGKILL
    folders = sorted((out / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["step-00000003", "step-00000004"]
    file = folders[-1] / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert newest_checkpoint(out / "checkpoints").step == 3
    (folders[0] / "optimizer.pt").unlink()
    with pytest.raises(InvalidInput, match="step-00000004"):
        newest_checkpoint(out / "checkpoints")


@pytest.mark.parametrize(
    ("name", "value"), [("epochs", 0), ("device", "tpu"), ("draft_vocab_size", -1), ("no_such", 1)]
)
def test_parameters_are_checked(ground: dict[str, str], tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=name):
        TrainParams.from_json(params_of(ground, tmp_path, **{name: value}))


def test_states_of_another_model_are_refused(ground: dict[str, str], tmp_path: Path) -> None:
    model = write_target_folder(tmp_path / "other", make_target())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 9}))
    with pytest.raises(InvalidInput, match="hidden, layers, vocab"):
        train(TrainParams.from_json(params_of({**ground, "model": str(model)}, tmp_path)), ignore_progress)


def test_the_learning_rate_warms_up_and_ends_near_zero() -> None:
    factors = [learning_rate_factor(step, 100) for step in range(100)]
    assert factors[0] == pytest.approx(0.1) and max(factors) == pytest.approx(1.0)
    assert factors[-1] < 0.01 and factors.index(max(factors)) == 9
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert learning_rate_factor(0, 1) == 1.0
