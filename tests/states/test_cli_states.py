"""``changeover states``: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from changeover.cli.states import app
from changeover.machine.errors import InvalidInput
from changeover.states.store import StatesWriter
from tests.states.fake_server import BOUNDARIES, FakeServer, serving
from tests.states.samples import make_sample, small_manifest


@pytest.fixture
def states(tmp_path: Path) -> Path:
    with StatesWriter.create(tmp_path / "states", small_manifest(model_name="a model")) as writer:
        for i in range(5):
            writer.add(make_sample(f"s{i}", tokens=20))
    return tmp_path / "states"


def test_verify_says_whole_and_exits_0(states: Path) -> None:
    result = CliRunner().invoke(app, ["verify", str(states)])
    assert result.exit_code == 0
    assert "whole; 5 of 5 samples hashed" in result.output


def test_verify_names_the_damage_and_exits_7(states: Path) -> None:
    shard = states / "shards/shard-00000.safetensors"
    os.truncate(shard, shard.stat().st_size - 4096)
    result = CliRunner().invoke(app, ["verify", str(states)])
    assert result.exit_code == 7
    assert "sample 's4', shard-00000.safetensors" in result.output
    answer = json.loads(CliRunner().invoke(app, ["verify", str(states), "--json", "--all"]).stdout)
    assert answer["ok"] is False
    assert {"s4", None} == {damage["sample"] for damage in answer["damages"]}


def test_verify_takes_a_share(states: Path) -> None:
    for share in ("40%", "0.4"):
        answer = json.loads(
            CliRunner().invoke(app, ["verify", str(states), "--json", "--sample", share]).stdout
        )
        assert (answer["hashed_samples"], answer["samples"], answer["ok"]) == (2, 5, True)
    for wrong in (["--sample", "most"], ["--sample", "0"], ["--sample", "1%", "--all"]):
        assert isinstance(CliRunner().invoke(app, ["verify", str(states), *wrong]).exception, InvalidInput)


def test_inspect_describes_the_folder(states: Path) -> None:
    text = CliRunner().invoke(app, ["inspect", str(states)]).stdout
    assert "a model" in text and "[2, 4, 5]" in text
    answer = json.loads(CliRunner().invoke(app, ["inspect", str(states), "--json"]).stdout)
    assert (answer["samples"], answer["tokens"], answer["supervised_tokens"]) == (5, 100, 75)
    assert answer["tokens_per_sample"] == {"min": 20, "median": 20, "max": 20}


def test_what_is_no_states_folder_is_said_so(tmp_path: Path) -> None:
    for command in ("verify", "inspect"):
        error = CliRunner().invoke(app, [command, str(tmp_path)]).exception
        assert isinstance(error, InvalidInput) and "manifest.json" in error.seen + error.expected


def test_collect_says_why_a_server_of_another_model_is_of_no_use(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """The rule-based server's states are not as wide as the named model's."""
    (tmp_path / "staging").mkdir()
    (tmp_path / "p.txt").write_text("one\ntwo\nthree\n")
    arguments = [
        "--prompts",
        str(tmp_path / "p.txt"),
        "--model",
        str(tiny_model_dir),
        "--out",
        str(tmp_path / "out"),
    ]
    arguments += ["--capture-dir", str(tmp_path / "staging"), "--boundaries", ",".join(map(str, BOUNDARIES))]
    arguments += ["--reserve-mib", "0", "--max-tokens", "10"]
    with serving(FakeServer(tmp_path / "staging")) as url:
        result = CliRunner().invoke(app, ["collect", "--url", url, *arguments])
    assert result.exception is not None and result.exit_code != 0
    assert "last of shape" in str(result.exception) or "aux of shape" in str(result.exception)
