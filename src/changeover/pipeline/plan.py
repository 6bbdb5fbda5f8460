"""What will happen and what it needs, computed before anything starts."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from changeover.engines.models import ModelFacts, describe_model
from changeover.engines.patch.installed import patch_refusal
from changeover.engines.registry import get_engine
from changeover.engines.versions import installed_version, version_refusal
from changeover.machine.errors import InvalidInput
from changeover.pipeline.commands import aux_boundaries, planned_launch
from changeover.pipeline.estimates import Estimate, disk_refusal, expected_tokens, minutes, states_bytes
from changeover.pipeline.spec import (
    BenchJob,
    CollectJob,
    CommandJob,
    CompareJob,
    HoldJob,
    JobSpec,
    PhaseSpec,
    PipelineSpec,
    TrainJob,
    held_out_share,
)
from changeover.states.prompts import is_held_out, read_prompts


@dataclass(frozen=True)
class PlannedJob:
    """One job: what it will do, the bytes it leaves, and how long it may take."""

    name: str
    kind: str
    does: str
    bytes: int
    minutes: Estimate


@dataclass(frozen=True)
class PlannedServer:
    """One server: its exact command, what it listens on, the memory of its weights."""

    engine: str
    profile: str
    argv: tuple[str, ...]
    env: dict[str, str]
    ports: tuple[int, ...]
    weights_bytes_per_device: int
    load_minutes: Estimate


@dataclass(frozen=True)
class PlannedPhase:
    name: str
    server: PlannedServer | None
    jobs: tuple[PlannedJob, ...]


@dataclass(frozen=True)
class Plan:
    """The whole. ``refusals``: what cannot work anywhere or on this disk; ``blockers``: what this version, or this
    machine, cannot run although it can be planned."""

    name: str
    model: ModelFacts
    phases: tuple[PlannedPhase, ...]
    refusals: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "model": self.model.to_json(),
            "phases": [asdict(phase) for phase in self.phases],
            "disk_bytes": self.disk_bytes,
            "refusals": list(self.refusals),
        }

    @property
    def disk_bytes(self) -> int:
        return sum(job.bytes for phase in self.phases for job in phase.jobs)


def make_plan(
    spec: PipelineSpec, models_dir: Path | None, runs_dir: Path, free_bytes: int | None = None
) -> Plan:
    """The plan of a spec on this machine; ``free_bytes`` is measured at ``runs_dir`` where it is not given.

    Raises InvalidInput for a model or prompts that cannot be read.
    """
    model = describe_model(spec.model.path, models_dir, spec.model.facts)
    phases = tuple(_plan_phase(spec, phase, model) for phase in spec.phases)
    free = free_disk_bytes(runs_dir) if free_bytes is None else free_bytes
    return Plan(
        spec.name,
        model,
        phases,
        tuple(_refusals(spec, model, phases, free, runs_dir)),
    )


def refuse_if_impossible(plan: Plan) -> None:
    """Raise InvalidInput for a refusal, before anything starts."""
    if plan.refusals:
        raise InvalidInput(
            expected="a pipeline that can work on this machine",
            seen="; ".join(plan.refusals),
            todo="`changeover plan` shows the whole.",
        )


def free_disk_bytes(folder: Path) -> int:
    """Free for us at ``folder``, or at the nearest folder above it that exists."""
    folder = folder.resolve()
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _plan_phase(spec: PipelineSpec, phase: PhaseSpec, model: ModelFacts) -> PlannedPhase:
    return PlannedPhase(
        phase.name,
        _plan_server(spec, phase, model),
        tuple(plan_job(spec, phase, job, model) for job in phase.jobs),
    )


def _plan_server(spec: PipelineSpec, phase: PhaseSpec, model: ModelFacts) -> PlannedServer | None:
    if phase.server is None:
        return None
    command = get_engine(spec.engine.kind).server_command(planned_launch(spec, phase.server, model))
    load = minutes(model.weights_bytes / 2**20, "MiB", spec.estimates.load_mib_per_s, "load_mib_per_s")
    return PlannedServer(
        engine=spec.engine.kind,
        profile=phase.server.profile,
        argv=tuple(command.argv),
        env=dict(command.env),
        ports=tuple(command.ports),
        weights_bytes_per_device=model.weights_bytes // spec.engine.tensor_parallel,
        load_minutes=load,
    )


def plan_job(spec: PipelineSpec, phase: PhaseSpec, job: JobSpec, model: ModelFacts) -> PlannedJob:
    """What one job will do, leave and take."""
    rates = spec.estimates
    match job:
        case BenchJob():
            requests = _bench_requests(spec, job)
            tokens = len(job.concurrency) * job.repeats * requests * job.max_tokens
            levels = ", ".join(map(str, job.concurrency))
            asked = f"every prompt once ({requests})" if job.requests == "all" else f"{requests} requests"
            does = f"{asked}, {job.repeats} times, at concurrency {levels}"
            return PlannedJob(
                job.name,
                job.kind,
                does,
                0,
                minutes(tokens, "tokens at most", rates.generated_tokens_per_s, "generated_tokens_per_s"),
            )
        case CollectJob():
            assert phase.server is not None
            tokens, basis = _collected_tokens(spec, job)
            boundaries = aux_boundaries(phase.server, model)
            size = states_bytes(tokens, model.hidden, len(boundaries))
            does = (
                f"{tokens:,} tokens ({basis}) x {len(boundaries) + 1} vectors (boundaries "
                f"{', '.join(map(str, boundaries))} and last) x {model.hidden} x 2 bytes"
            )
            return PlannedJob(
                job.name,
                job.kind,
                does,
                size,
                minutes(tokens, "tokens", rates.captured_tokens_per_s, "captured_tokens_per_s"),
            )
        case TrainJob():
            collected = _tokens_of_states(spec, job)
            does = f"{job.epochs} epochs, training-time test {job.ttt_steps}, {job.draft_vocab_size} draft tokens"
            time = (
                minutes(collected * job.epochs, "tokens", rates.trained_tokens_per_s, "trained_tokens_per_s")
                if collected is not None
                else Estimate(None, "unknown: the states stand outside of this pipeline")
            )
            return PlannedJob(job.name, job.kind, does, 0, time)
        case CompareJob():
            return PlannedJob(
                job.name, job.kind, f"{job.candidate} with {job.baseline}", 0, Estimate(0.0, "")
            )
        case CommandJob():
            return PlannedJob(
                job.name, job.kind, shlex.join(job.argv), 0, Estimate(None, "unknown: your command")
            )
        case HoldJob():
            return PlannedJob(
                job.name, job.kind, "the server stays up", 0, Estimate(None, "until it is stopped")
            )


def _bench_requests(spec: PipelineSpec, job: BenchJob) -> int:
    """Requests of one repeat at one level. Raises InvalidInput when `all` leaves no prompt to measure."""
    if job.requests != "all":
        return job.requests
    prompts = read_prompts(Path(job.prompts or spec.prompts))
    if job.held_out_only:
        share = held_out_share(spec)
        prompts = [prompt for prompt in prompts if is_held_out(prompt.id, share)]
    if len(prompts) <= job.warmup:
        raise InvalidInput(
            expected=f"more prompts than the {job.warmup} of the warm-up, for bench job `{job.name}`",
            seen=f"{len(prompts)}{' held out from training' if job.held_out_only else ''}",
            todo="Add prompts, or lower `warmup`.",
        )
    return len(prompts) - job.warmup


def _collected_tokens(spec: PipelineSpec, job: CollectJob) -> tuple[int, str]:
    if job.expected_tokens is not None:
        return job.expected_tokens, "expected_tokens"
    prompts = read_prompts(Path(job.prompts or spec.prompts), job.samples)
    characters = sum(prompt.characters for prompt in prompts)
    return expected_tokens(characters, len(prompts), job.max_tokens), f"at most, {len(prompts)} prompts"


def _tokens_of_states(spec: PipelineSpec, job: TrainJob) -> int | None:
    for phase in spec.phases:
        for candidate in phase.jobs:
            if f"{phase.name}/{candidate.name}" == job.states and isinstance(candidate, CollectJob):
                return _collected_tokens(spec, candidate)[0]
    return None


def _refusals(
    spec: PipelineSpec, model: ModelFacts, phases: Sequence[PlannedPhase], free_bytes: int, runs_dir: Path
) -> list[str]:
    found = []
    engine = get_engine(spec.engine.kind)
    version = installed_version(spec.engine.kind, spec.engine.python or sys.executable)
    for phase in spec.phases:
        if phase.server is None:
            continue
        too_old = version_refusal(spec.engine.kind, version, phase.server.profile)
        found += [f"{phase.name}: {too_old}"] if too_old else []
        if phase.server.capture_through == "patch" and spec.engine.kind == "sglang":
            no_patch = patch_refusal(spec.engine.python or sys.executable, model.architecture)
            found += [f"{phase.name}: {no_patch}"] if no_patch else []
        for boundary in aux_boundaries(phase.server, model) if phase.server.profile == "capture" else ():
            if boundary > model.layers:
                found.append(
                    f"{phase.name}: expected aux_boundaries of at most {model.layers}, the model's layers; "
                    f"saw {boundary}"
                )
        found += [
            f"{phase.name}: {reason}" for reason in engine.refusals(planned_launch(spec, phase.server, model))
        ]
    needed = sum(job.bytes for phase in phases for job in phase.jobs)
    reserve = max(
        (job.disk_reserve_gib for phase in spec.phases for job in phase.jobs if isinstance(job, CollectJob)),
        default=0.0,
    )
    short = disk_refusal(needed, int(reserve * 2**30), free_bytes, str(runs_dir.resolve()))
    return found + ([short] if short is not None else [])
