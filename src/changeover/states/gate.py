"""The gate at the end of a collection: only behind it is the folder called complete, and the server torn
down.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# A dataset that lost more than this is not the one that was asked for.
MAX_FAILED_SHARE = 0.1


@dataclass(frozen=True)
class GateFacts:
    """What is so at the end: ids asked for, had, failed (with their reason); and what stands in the way."""

    requested: Collection[str]
    present: Collection[str]
    answered: Collection[str]
    failed: Mapping[str, str]
    damages: Sequence[str]
    staging_files: Sequence[str]
    open_samples: int
    probe_passed: bool


def objections(facts: GateFacts) -> list[str]:
    """What keeps the gate shut, in words; empty when it opens."""
    found: list[str] = []
    present, failed = set(facts.present), set(facts.failed)
    if not present:
        found.append("no sample is stored")
    if missing := [i for i in facts.requested if i not in present and i not in failed]:
        found.append(f"{len(missing)} samples neither stored nor listed as failed, {_some(missing)}")
    lost = [i for i in facts.requested if i in failed and i not in present]
    if len(lost) > MAX_FAILED_SHARE * len(facts.requested):
        reasons = sorted({facts.failed[i] for i in lost})
        found.append(
            f"{len(lost)} of {len(facts.requested)} samples failed "
            f"(at most {MAX_FAILED_SHARE:.0%} may): {reasons[0]}"
        )
    if unanswered := sorted(present - set(facts.answered)):
        found.append(f"{len(unanswered)} samples without a line in answers.jsonl, {_some(unanswered)}")
    if facts.damages:
        found.append(f"{len(facts.damages)} damages, first: {facts.damages[0]}")
    if facts.staging_files:
        found.append(
            f"{len(facts.staging_files)} captured files left in staging, {_some(facts.staging_files)}"
        )
    if facts.open_samples:
        found.append(f"{facts.open_samples} samples in a shard that is still open")
    if not facts.probe_passed:
        found.append("the probe did not pass")
    return found


def gate_json(
    facts: GateFacts, *, tokens: int, supervised_tokens: int, size_bytes: int, ids_sha256: str
) -> dict[str, Any]:
    """What the manifest keeps of the gate: enough to notice later that a sample went missing."""
    return {
        "requested": len(facts.requested),
        "samples": len(facts.present),
        "failed": len(facts.failed),
        "tokens": tokens,
        "supervised_tokens": supervised_tokens,
        "bytes": size_bytes,
        "ids_sha256": ids_sha256,
        "objections": objections(facts),
    }


def _some(ids: Sequence[str]) -> str:
    shown = ", ".join(ids[:3])
    return f"e.g. {shown}" if len(ids) > 3 else shown
