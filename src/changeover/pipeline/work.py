"""The kinds of jobs: from the user's words to a room's parameters, and the room's function that does the work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from changeover import __version__
from changeover.engines.versions import installed_version
from changeover.machine.errors import ChangeoverError
from changeover.machine.progress import Progress, ProgressSink
from changeover.pipeline.commands import aux_boundaries, capture_dir
from changeover.pipeline.context import RunContext
from changeover.pipeline.spec import (
    BenchJob,
    CollectJob,
    CommandJob,
    CompareJob,
    HoldJob,
    JobSpec,
    TrainJob,
    held_out_share,
)

# What each kind leaves in its folder, to be recorded with hashes when it is done
OUTPUTS: Mapping[str, tuple[str, ...]] = {
    "bench": ("result.json", "requests.jsonl"),
    "collect": ("result.json", "states"),
    "train": ("result.json", "drafter"),
    "compare": ("result.json",),
    "command": ("result.json",),
}


def job_params(
    context: RunContext, job: JobSpec, folder: Path, server_url: str | None, phase_index: int
) -> dict[str, Any]:
    """What ``job.json`` says: JSON values only, paths as text."""
    match job:
        case BenchJob():
            return _bench_params(context, job, folder, server_url)
        case CollectJob():
            return _collect_params(context, job, folder, server_url, phase_index)
        case TrainJob():
            return _train_params(context, job, folder)
        case CompareJob():
            return {
                "baseline": str(context.job_folder(job.baseline) / "result.json"),
                "candidate": str(context.job_folder(job.candidate) / "result.json"),
            }
        case CommandJob():
            return {"argv": list(job.argv)}
        case HoldJob():
            raise AssertionError("a held server is waited for by the runner; it is no work of a process")


def job_environment(job: JobSpec, server_url: str | None) -> dict[str, str]:
    """What is added to a job's environment."""
    own = dict(job.env) if isinstance(job, CommandJob) else {}
    return own | ({"CHANGEOVER_SERVER_URL": server_url} if server_url is not None else {})


def _bench_params(context: RunContext, job: BenchJob, folder: Path, url: str | None) -> dict[str, Any]:
    return {
        "url": url,
        "prompts": job.prompts or context.spec.prompts,
        "concurrency": list(job.concurrency),
        "requests": None if job.requests == "all" else job.requests,
        "max_tokens": job.max_tokens,
        "repeats": job.repeats,
        "warmup": job.warmup,
        "seed": context.spec.seed,
        "held_out": held_out_share(context.spec) if job.held_out_only else None,
        "out": str(folder),
    }


def _collect_params(
    context: RunContext, job: CollectJob, folder: Path, url: str | None, phase_index: int
) -> dict[str, Any]:
    phase = context.spec.phases[phase_index]
    assert phase.server is not None
    model = context.model
    return {
        "url": url,
        "prompts": job.prompts or context.spec.prompts,
        "limit": job.samples,
        "out": str(folder / "states"),
        "capture_dir": str(capture_dir(context, phase_index)),
        "model_path": str(model.path),
        "model_name": context.spec.model.path,
        "model_sha256": model.sha256,
        "hidden": model.hidden,
        "layers": model.layers,
        "vocab": model.vocab,
        "boundaries": list(aux_boundaries(phase.server, model)),
        "engine_kind": context.spec.engine.kind,
        "engine_version": _engine_version(context),
        "max_tokens": job.max_tokens,
        "concurrency": job.concurrency,
        "held_out_fraction": job.held_out,
        "staging_budget_bytes": job.staging_budget_mib * 2**20,
        "disk_reserve_bytes": int(job.disk_reserve_gib * 2**30),
    }


def _engine_version(context: RunContext) -> str:
    """The embedded engine is this program."""
    engine = context.spec.engine
    return installed_version(engine.kind, engine.python or sys.executable) or __version__


def _train_params(context: RunContext, job: TrainJob, folder: Path) -> dict[str, Any]:
    return {
        "states": str(context.made(job.states, "states")),
        "model": str(context.model.path),
        "out": str(folder),
        "epochs": job.epochs,
        "learning_rate": job.learning_rate,
        "batch_tokens": job.batch_tokens,
        "ttt_steps": job.ttt_steps,
        "draft_vocab_size": job.draft_vocab_size,
        "eval_draft_tokens": job.eval_draft_tokens,
        "seed": context.spec.seed,
        "device": job.device,
        "checkpoint_every_s": job.checkpoint_every_s,
    }


def do_bench(params: Mapping[str, Any], on_progress: ProgressSink) -> dict[str, Any]:
    from changeover.bench.run import BenchParams, bench

    return bench(BenchParams.from_json(params), on_progress)


def do_collect(params: Mapping[str, Any], on_progress: ProgressSink) -> dict[str, Any]:
    from changeover.states.collect import collect
    from changeover.states.params import CollectParams

    return collect(CollectParams.from_json(params), on_progress)


def do_train(params: Mapping[str, Any], on_progress: ProgressSink) -> dict[str, Any]:
    from changeover.drafter.params import TrainParams
    from changeover.drafter.train import train

    return train(TrainParams.from_json(params), on_progress)


def do_compare(params: Mapping[str, Any], on_progress: ProgressSink) -> dict[str, Any]:
    from changeover.bench.compare import compare
    from changeover.bench.records import read_result

    return compare(read_result(Path(params["baseline"])), read_result(Path(params["candidate"])))


def do_command(params: Mapping[str, Any], on_progress: ProgressSink) -> dict[str, Any]:
    """Run the user's command in the job's folder; its output is the job's log."""
    on_progress(Progress("running", 0, None, ""))
    status = subprocess.run(params["argv"], check=False).returncode
    if status != 0:
        raise ChangeoverError(
            expected=f"exit status 0 of {params['argv'][0]}",
            seen=str(status),
            todo="The job's log has its output.",
        )
    return {"exit_status": status}


Work = Callable[[Mapping[str, Any], ProgressSink], dict[str, Any]]
WORK: Mapping[str, Work] = {
    "bench": do_bench,
    "collect": do_collect,
    "train": do_train,
    "compare": do_compare,
    "command": do_command,
}
