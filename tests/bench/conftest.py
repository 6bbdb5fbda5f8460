"""Prompts and short benchmarks for this room's tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from changeover.bench.run import BenchParams, bench
from changeover.machine.progress import ignore_progress

# A busy machine may stop any example for longer than hypothesis allows by default; the values are what is tested.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

Measure = Callable[..., dict[str, Any]]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Twenty chat prompts, p0 to p19."""
    path = tmp_path / "prompts.jsonl"
    lines = ({"id": f"p{n}", "messages": [{"role": "user", "content": f"question {n}"}]} for n in range(20))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def measure(prompts: Path) -> Measure:
    """Benchmark a server: one level, one repeat, four requests, no warm-up, unless told."""

    def run(url: str, **changes: Any) -> dict[str, Any]:
        params = {"concurrency": (1,), "repeats": 1, "requests": 4, "warmup": 0, "timeout_s": 30.0, **changes}
        return bench(BenchParams(url=url, prompts=prompts, **params), ignore_progress)

    return run


def only_repeat(result: dict[str, Any]) -> dict[str, Any]:
    (level,) = result["levels"]
    repeat: dict[str, Any]
    (repeat,) = level["repeats"]
    return repeat
