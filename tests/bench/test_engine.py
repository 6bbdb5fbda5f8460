"""Benchmarks of the real embedded server: plain and speculative, counted by the client and by the server alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from changeover.bench.compare import compare
from tests.bench.conftest import Measure
from tests.engine_fixtures import start_embedded
from tests.engines.drafters import write_drafter

pytestmark = pytest.mark.engine


def test_real_model_is_counted_as_the_server_counts(
    model_dir: Path, measure: Measure, tmp_path: Path
) -> None:
    with start_embedded(model_dir, "--dtype", "float32", log=tmp_path / "log") as server:
        before = server.metric("generation_tokens_total")
        result = measure(server.url, concurrency=(1, 3), requests=3, warmup=1, max_tokens=12, timeout_s=200.0)
        generated = server.metric("generation_tokens_total") - before
    repeats = [repeat for level in result["levels"] for repeat in level["repeats"]]
    assert result["server"] == {"url": server.url, "model": model_dir.name, "engine": "embedded"}
    assert [repeat["requests"]["ok"] for repeat in repeats] == [3, 3]
    warm_up_tokens = generated - sum(repeat["output_tokens"] for repeat in repeats)
    assert 2 <= warm_up_tokens <= 24  # two requests of at most 12
    for repeat in repeats:
        assert repeat["ttft_s"]["n"] == repeat["tpot_s"]["n"] == 3 and repeat["missing"].keys() == {
            "acceptance"
        }


def test_speculative_server_against_plain_one(tiny_model_dir: Path, measure: Measure, tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter", tiny_model_dir)
    results = []
    for name, flags in (("plain", ()), ("speculative", ("--drafter", str(drafter), "--draft-tokens", "3"))):
        with start_embedded(tiny_model_dir, *flags, log=tmp_path / f"{name}.log") as server:
            results.append(measure(server.url, requests=4, repeats=2, max_tokens=24, ignore_eos=True))
            if flags:
                lifetime = server.metric("spec_decode_num_drafts_total")
    comparison = compare(*results)
    (level,) = comparison["levels"]
    assert level["outputs_equal"]["share"] == 1.0
    assert level["acceptance"]["a"] is None
    measured = level["acceptance"]["b"]
    # No warm-up and nobody else: the repeats' differences add up to the server's lifetime.
    assert measured["drafts"] == lifetime
    by_request = [repeat["acceptance_by_request"] for repeat in results[1]["levels"][0]["repeats"]]
    counts = [counts for repeat in by_request for counts in repeat]
    assert len(counts) == 2 * 4 and sum(drafts for drafts, _ in counts) == lifetime
    assert sum(accepted for _, accepted in counts) == measured["accepted_tokens"]
    assert measured["interval"] is None and measured["reason"].startswith("prompts drafted for: 4")
    # Each request: one token from the prompt, the rest from verify steps; a last single one needs no draft.
    assert 2 * 4 * (24 - 2) <= measured["drafts"] + measured["accepted_tokens"] <= 2 * 4 * (24 - 1)
    json.dumps(comparison, allow_nan=False)
