"""The end of a collection: probe, verify, gate, and only then the word ``sealed`` in the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from changeover.machine.progress import Progress, ProgressSink
from changeover.states import lines
from changeover.states.errors import CollectFailed
from changeover.states.gate import GateFacts, gate_json, objections
from changeover.states.params import CollectParams
from changeover.states.probe import ProbeResult, probe
from changeover.states.prompts import Prompt, is_held_out
from changeover.states.reader import StatesReader
from changeover.states.staging import Staging
from changeover.states.verify import ids_digest, verify
from changeover.states.writer import ANSWERS_NAME, FAILURES_NAME, StatesWriter


def seal(
    params: CollectParams,
    writer: StatesWriter,
    prompts: list[Prompt],
    staging: Staging,
    on_progress: ProgressSink,
) -> dict[str, Any]:
    """Seal the folder; returns the figures about all of it.

    Raises CollectFailed where the probe or the gate says no (the manifest then has the verdicts, unsealed).
    """
    if not writer.committed:
        reasons = sorted({failure["reason"] for failure in read_failures(params.out).values()})
        raise CollectFailed(
            expected="at least one sample",
            seen=f"none; {reasons[0] if reasons else 'no failure recorded'}",
            todo="See failures.jsonl and the server's log.",
        )
    on_progress(Progress("probe", 0, 1, "probes"))
    verdict = probe(StatesReader(params.out), params.model_path)
    on_progress(Progress("probe", 1, 1, "probes", {"agreement": verdict.agreement}))
    staging.sweep()
    facts = _facts(params, writer, prompts, staging, verdict, on_progress)
    entries = list(writer.committed.values())
    gate = gate_json(
        facts,
        tokens=sum(entry.tokens for entry in entries),
        supervised_tokens=sum(entry.supervised_tokens for entry in entries),
        size_bytes=sum(entry.bytes for entry in entries),
        ids_sha256=ids_digest(writer.committed),
    )
    against = objections(facts)
    writer.write_end(probe=verdict.to_json(), gate=gate, sealed=not against)
    _raise_if_shut(params.out, verdict, against)
    return {
        "states": str(params.out),
        "samples": len(entries),
        "held_out": sum(is_held_out(entry.id, params.held_out_fraction) for entry in entries),
        "failed": len(facts.failed),
        "failures": [{"id": i, "reason": reason} for i, reason in sorted(facts.failed.items())[:20]],
        "tokens": gate["tokens"],
        "supervised_tokens": gate["supervised_tokens"],
        "bytes": gate["bytes"],
        "shards": len({entry.shard for entry in entries}),
        "boundaries": list(params.boundaries),
        "hidden": params.hidden,
        "last_norm": writer.manifest.last_norm,
        "codec": params.codec,
        "probe": verdict.to_json(),
        "gate": gate,
    }


def read_failures(root: Path) -> dict[str, dict[str, Any]]:
    """The last failure of each sample, by id."""
    whole = (line.value for line in lines.read_lines(root / FAILURES_NAME) if line.value is not None)
    return {failure["id"]: failure for failure in whole}


def _facts(
    params: CollectParams,
    writer: StatesWriter,
    prompts: list[Prompt],
    staging: Staging,
    verdict: ProbeResult,
    on_progress: ProgressSink,
) -> GateFacts:
    def on_record(done: int, total: int) -> None:
        on_progress(Progress("verify", done, total, "samples"))

    verification = verify(params.out, on_record=on_record)
    failures = read_failures(params.out)
    answers = lines.read_lines(params.out / ANSWERS_NAME)
    return GateFacts(
        requested=[prompt.id for prompt in prompts],
        present=list(writer.committed),
        answered=[line.value["id"] for line in answers if line.value is not None],
        failed={i: failure["reason"] for i, failure in failures.items() if i not in writer.committed},
        damages=[str(damage) for damage in verification.damages],
        staging_files=[path.name for path in staging.files()],
        open_samples=writer.open_samples,
        probe_passed=verdict.passed,
    )


def _raise_if_shut(root: Path, verdict: ProbeResult, against: list[str]) -> None:
    if not verdict.passed:
        raise CollectFailed(
            expected=f"lm_head of a state to give the next token in {verdict.min_agreement:.0%}",
            seen=f"{verdict.agreement:.1%} of {verdict.rows} rows (worst sample {verdict.worst_sample!r})",
            todo="Boundaries, norm or model are not the ones said: mend the server, collect anew.",
        )
    if against:
        raise CollectFailed(
            expected="a complete collection",
            seen="; ".join(against),
            todo=f"Resume the collection, or run 'changeover states verify {root}'.",
        )
