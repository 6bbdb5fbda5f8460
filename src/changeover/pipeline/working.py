"""Doing one job of a phase as a process of its own, and following it to its end."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from changeover.machine.durable import replace_json
from changeover.pipeline.context import PhaseFailed, RunContext
from changeover.pipeline.digest import job_digest
from changeover.pipeline.follow import Tail, Throttle, log_tail, read_progress
from changeover.pipeline.journal import EventName
from changeover.pipeline.outputs import record_outputs
from changeover.pipeline.processes import PhaseProcesses
from changeover.pipeline.spec import JobSpec
from changeover.pipeline.work import OUTPUTS, job_environment, job_params
from changeover.teardown.launch import Owned

_LOOK_S = 0.2
_PROGRESS_PERIOD_S = 1.0
_PROGRESS_SHARE = 1 / 600


def run_job(
    context: RunContext, index: int, phase: str, job: JobSpec, url: str | None, processes: PhaseProcesses
) -> None:
    """Do it and write its result into the journal; raises PhaseFailed where it, or the server under it, ends badly."""
    digest = context.state().phase(phase).digest
    folder = prepare_folder(context.folder.job(index, phase, job.name), digest)
    params = job_params(context, job, folder, url, index)
    replace_json(folder / "job.json", {"kind": job.kind, "digest": digest, "params": params})
    tail = Tail(folder / "progress.jsonl")
    journal, clock = context.journal, context.machine.clock
    named = {"phase": phase, "job": job.name, "kind": job.kind}
    cgroup = processes.make_cgroup(job.name)
    journal.append(EventName.JOB_STARTING, **named, files=[str(folder)], params=params, cgroup=cgroup)
    started_s = clock.monotonic()
    owned = processes.start(
        job.name,
        argv=[sys.executable, "-m", "changeover.pipeline.job", str(folder)],
        env=job_environment(job, url),
        folder=folder,
        files=(str(folder),),
        cgroup=cgroup,
    )
    journal.append(
        EventName.JOB_STARTED,
        **named,
        leader=owned.identity.to_json(),
        pid=owned.pid,
        start_ticks=owned.identity.start_ticks,
        params=params,
    )
    status = _follow(context, phase, job, owned, tail, processes)
    if status != 0:
        failure = _read_failure(folder, status)
        reason = f"expected {failure['expected']}; saw {failure['seen']}"
        journal.append(EventName.JOB_FAILED, **named, reason=reason, log_tail=log_tail(owned.log))
        raise PhaseFailed(
            expected=f"job {job.name} of phase {phase} to succeed: {failure['expected']}",
            seen=failure["seen"],
            todo=failure["todo"],
        )
    journal.append(
        EventName.JOB_DONE,
        **named,
        digest=job_digest(phase, job, context.state()),
        seconds=clock.monotonic() - started_s,
        result=json.loads((folder / "result.json").read_text()),
        outputs=record_outputs(folder, OUTPUTS[job.kind]),
    )


def prepare_folder(folder: Path, digest: str) -> Path:
    """The job's folder, made where it is not there.

    What an earlier try at the same question left stays (states and checkpoints are resumed from); what belongs to
    another question (other values, other inputs) is moved aside, never mixed and never deleted.
    """
    try:
        asked = json.loads((folder / "job.json").read_text())["digest"]
    except (FileNotFoundError, ValueError, KeyError):
        asked = None
    if folder.exists() and asked != digest:
        number = next(
            n for n in range(1, 10_000) if not folder.with_name(f"{folder.name}.replaced-{n}").exists()
        )
        folder.rename(folder.with_name(f"{folder.name}.replaced-{number}"))
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (
        "result.json",
        "failure.json",
    ):  # a job that is killed at its start must not tell the old reason
        (folder / stale).unlink(missing_ok=True)
    return folder


def _follow(
    context: RunContext, phase: str, job: JobSpec, owned: Owned, tail: Tail, processes: PhaseProcesses
) -> int:
    """The job's exit status; raises PhaseFailed where the server dies under it, Interrupted where asked to stop."""
    due = Throttle(context.machine.clock.monotonic, _PROGRESS_PERIOD_S, _PROGRESS_SHARE)
    while True:
        status = owned.exit_code()  # before the last look at the file, so that no line is missed
        for progress in read_progress(tail.lines()):
            if status is not None or due.allows(progress.stage):
                context.journal.note(
                    EventName.JOB_PROGRESS, phase=phase, job=job.name, progress=progress.to_json()
                )
        if status is not None:
            return status
        context.check()
        processes.note_members()
        processes.expect_server(f"job {job.name} runs")
        handle = context.machine.open(owned.identity)
        if handle is not None:
            context.machine.wait([handle], _LOOK_S)
            context.machine.close(handle)


def _read_failure(folder: Path, status: int) -> dict[str, str]:
    try:
        failure: dict[str, str] = json.loads((folder / "failure.json").read_text())
    except FileNotFoundError:
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        failure = {
            "expected": "it to end with a result",
            "seen": f"it ended by {how}",
            "todo": f"Its log: {folder / 'log'}",
        }
    return failure
