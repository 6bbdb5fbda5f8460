"""The gate: each thing that keeps it shut, alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from changeover.states.gate import GateFacts, objections

GOOD = GateFacts(
    requested=[f"s{i}" for i in range(20)],
    present=[f"s{i}" for i in range(19)],
    answered=[f"s{i}" for i in range(20)],
    failed={"s19": "HTTP 400: too long"},
    damages=[],
    staging_files=[],
    open_samples=0,
    probe_passed=True,
)


def test_it_opens_when_everything_is_had_or_listed() -> None:
    assert objections(GOOD) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"failed": {}}, "1 samples neither stored nor listed as failed, s19"),
        (
            {"failed": {f"s{i}": "HTTP 400" for i in range(15, 20)}, "present": GOOD.present[:15]},
            "5 of 20 samples failed",
        ),
        ({"answered": GOOD.answered[1:]}, "1 samples without a line in answers.jsonl, s0"),
        ({"damages": ["record: bad"]}, "first: record: bad"),
        ({"staging_files": ["a", "b"]}, "2 captured files left in staging"),
        ({"open_samples": 3}, "3 samples in a shard that is still open"),
        ({"probe_passed": False}, "probe"),
    ],
)
def test_each_reason_keeps_it_shut(change: dict, words: str) -> None:
    found = objections(replace(GOOD, **change))
    assert len(found) == 1
    assert words in found[0]


def test_an_empty_folder_keeps_it_shut() -> None:
    found = objections(replace(GOOD, present=[], answered=[], failed=dict.fromkeys(GOOD.requested, "down")))
    assert "no sample is stored" in found
