"""What a phase or a job stands on, as one hash: done work counts only for the very same question."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from changeover.engines.models import ModelFacts
from changeover.machine.errors import InvalidInput
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


def job_digest(phase: str, job: JobSpec, state: RunState) -> str:
    """Hash of one job within a phase, with what it takes from other jobs of that phase (phase_digest has the rest)."""
    value = {"phase": phase, "job": job.model_dump(mode="json")}
    inputs = {name: _outputs_of(state, f"{phase}/{name}") for name in sorted(stands_on(phase, job))}
    return _hash(value | ({"inputs": inputs} if inputs else {}))


def stands_on(phase: str, job: JobSpec) -> set[str]:
    """Names of the jobs of its own phase whose outputs a job takes."""
    parts = (reference.partition("/") for reference in _job_references(job) if not is_path(reference))
    return {name for other, _, name in parts if other == phase}


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


def _outputs_of(state: RunState, reference: str) -> list[dict[str, Any]] | None:
    """None where that job has not been done."""
    phase, _, job = reference.partition("/")
    done = state.phases[phase].jobs.get(job) if phase in state.phases else None
    return None if done is None else done.outputs


def _file_hash(path: Path) -> str:
    """Raises InvalidInput where the file cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InvalidInput(
            expected=f"a file of prompts at {path}",
            seen=error.strerror or str(error),
            todo="Put it there (back, for a run that is resumed); other prompts need a new run.",
        ) from error


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
