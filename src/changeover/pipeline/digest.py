"""What a phase or a job stands on, as one hash: done work counts only for the very same question."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from changeover.engines.models import ModelFacts
from changeover.pipeline.spec import CompareJob, JobSpec, PhaseSpec, PipelineSpec, TrainJob, is_path
from changeover.pipeline.state import RunState


def phase_digest(spec: PipelineSpec, phase: PhaseSpec, model: ModelFacts, state: RunState) -> str:
    """Hash of everything that decides what a phase does: its text, the engine, the model, prompts, earlier results."""
    prompts = {job.prompts or spec.prompts for job in phase.jobs if job.kind in ("bench", "collect")}
    return _hash(
        {
            "phase": phase.model_dump(mode="json"),
            "engine": spec.engine.model_dump(mode="json"),
            "seed": spec.seed,
            "model": model.sha256,
            "prompts": {name: _file_hash(Path(name)) for name in sorted(prompts)},
            "inputs": {reference: _outputs_of(state, reference) for reference in sorted(_references(phase))},
        }
    )


def job_digest(phase: str, job: JobSpec) -> str:
    """Hash of one job within a phase."""
    return _hash({"phase": phase, "job": job.model_dump(mode="json")})


def _references(phase: PhaseSpec) -> set[str]:
    found = {phase.server.drafter} if phase.server is not None and phase.server.drafter is not None else set()
    for job in phase.jobs:
        found |= _job_references(job)
    own = {f"{phase.name}/{job.name}" for job in phase.jobs}
    return {reference for reference in found if not is_path(reference) and reference not in own}


def _job_references(job: JobSpec) -> set[str]:
    match job:
        case TrainJob():
            return {job.states}
        case CompareJob():
            return {job.baseline, job.candidate}
        case _:
            return set()


def _outputs_of(state: RunState, reference: str) -> list[dict[str, Any]]:
    phase, _, job = reference.partition("/")
    return state.phases[phase].jobs[job].outputs


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
