"""``changeover bench`` and ``changeover compare`` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from changeover.cli.bench import bench, parse_levels, parse_requests
from changeover.cli.compare import compare
from changeover.machine.errors import InvalidInput
from tests.bench.mock_server import Script, serving

app = typer.Typer()
app.command("bench")(bench)
app.command("compare")(compare)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"question {n}\n" for n in range(9)))
    return path


def run(*arguments: object) -> tuple[str, str]:
    outcome = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout, outcome.stderr


def test_bench_then_compare(prompts: Path, tmp_path: Path) -> None:
    load = ("--prompts", prompts, "--concurrency", "1,2", "--requests", 3, "--max-tokens", 8, "--repeats", 2)
    for name in ("a", "b"):
        with serving(Script()) as server:
            stdout, stderr = run("bench", "--url", server.url, *load, "--out", tmp_path / name, "--json")
        assert json.loads(stdout) == json.loads((tmp_path / name / "result.json").read_text())
        assert "bench: repeat 2 of 2 at 2, 3 of 3 requests, output tokens 24" in stderr
        assert len((tmp_path / name / "requests.jsonl").read_text().splitlines()) == 12
    files = [tmp_path / name / "result.json" for name in ("a", "b")]
    stdout, _ = run("compare", *files, "--json")
    assert json.loads(stdout)["levels"][0]["outputs_equal"]["share"] == 1.0
    stdout, _ = run("compare", *files)
    assert (
        "acc. len" in stdout and "single-stream" in stdout and "12 of 12" not in stdout and "6 of 6" in stdout
    )


def test_bench_prints_a_table_for_people(prompts: Path) -> None:
    with serving(Script()) as server:
        stdout, _ = run(
            "bench", "--url", server.url, "--prompts", prompts, "--concurrency", "2", "--requests", 3
        )
    assert "tok/s" in stdout and "TTFT ms" in stdout and "t_last - t_first" in stdout


def test_requests_may_be_all_prompts_once(prompts: Path) -> None:
    with serving(Script()) as server:
        stdout, _ = run(
            "bench", "--url", server.url, "--prompts", prompts, "--concurrency", "2", "--requests", "all",
            "--repeats", 1, "--warmup", 0, "--json",
        )  # fmt: skip
    assert json.loads(stdout)["load"]["requests"] == len(server.bodies) == 9


@pytest.mark.parametrize("text", ["", "every", "1.5"])
def test_requests_that_are_no_number(text: str) -> None:
    assert parse_requests("16") == 16
    with pytest.raises(InvalidInput, match="or `all`"):
        parse_requests(text)


def test_result_is_never_written_over(prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(InvalidInput, match="without a result"):
        run("bench", "--url", "http://127.0.0.1:1", "--prompts", prompts, "--out", tmp_path)


@pytest.mark.parametrize("text", ["", "1,x", "1.5", "1,,2"])
def test_levels_that_are_none(text: str) -> None:
    with pytest.raises(InvalidInput, match="levels such as"):
        parse_levels(text)


@pytest.mark.parametrize("content", ["{", '{"kind": "compare"}', '{"kind": "bench", "x": NaN}', "[]", None])
def test_compare_refuses_what_is_no_result(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidInput, match="a benchmark result in"):
        run("compare", path, path)
