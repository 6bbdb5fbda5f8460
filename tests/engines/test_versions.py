"""What is installed, and what it can do."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from changeover.engines.versions import SUPPORT, installed_version, parsed, version_refusal


@pytest.fixture(autouse=True)
def forgotten() -> None:
    installed_version.cache_clear()


def python(folder: Path, script: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_engines_own_interpreter_is_asked(tmp_path: Path) -> None:
    assert installed_version("vllm", python(tmp_path, "echo 0.32.0+cpu")) == "0.32.0+cpu"


@pytest.mark.parametrize("script", ["exit 1", "true"])
def test_an_interpreter_without_it_has_no_version(tmp_path: Path, script: str) -> None:
    assert installed_version("sglang", python(tmp_path, script)) is None
    assert installed_version("sglang", "/nowhere/python") is None
    assert installed_version("embedded", "/nowhere/python") is None


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("0.5.23", (0, 5, 23)), ("0.5.10.post1", (0, 5, 10)), ("v0.32.0+cpu", (0, 32, 0)), ("main", ())],
)
def test_versions_are_compared_by_their_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert parsed(version) == numbers


@pytest.mark.parametrize(
    ("kind", "version", "profile", "refused"),
    [
        ("sglang", "0.5.16", "capture", True),
        ("sglang", "0.5.17", "capture", False),
        ("sglang", "0.5.16", "speculative", False),
        ("vllm", "0.25.1", "capture", True),
        ("vllm", "0.33.0", "capture", False),
        ("vllm", None, "capture", False),
        ("embedded", "0.0.1", "capture", False),
    ],
)
def test_a_version_that_cannot_capture_is_refused_with_the_reason(
    kind: str, version: str | None, profile: str, refused: bool
) -> None:
    said = version_refusal(kind, version, profile)  # type: ignore[arg-type]
    assert (said is not None) == refused
    if said:
        assert version in said and SUPPORT[kind].why in said  # type: ignore[operator]


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_what_was_run_can_be_driven(kind: str) -> None:
    assert all(version_refusal(kind, version, "capture") is None for version in SUPPORT[kind].run_with)
