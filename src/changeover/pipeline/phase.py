"""Doing one phase: baseline, server, jobs, and the changeover that proves the machine clean behind it."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass, replace
from typing import Any

from changeover.engines.protocol import ServerCommand
from changeover.engines.readiness import wait_ready
from changeover.engines.registry import get_engine
from changeover.machine.progress import Progress
from changeover.pipeline.changeover import change_over
from changeover.pipeline.commands import server_command
from changeover.pipeline.context import MachineNotClear, PhaseFailed, RunContext
from changeover.pipeline.digest import job_digest, phase_digest
from changeover.pipeline.follow import Interrupted, Tail, Throttle, log_tail, read_progress
from changeover.pipeline.journal import EventName
from changeover.pipeline.outputs import changed_outputs, record_outputs, write_json
from changeover.pipeline.spec import JobSpec, PhaseSpec
from changeover.pipeline.work import OUTPUTS, job_environment, job_params
from changeover.teardown.clear import observe
from changeover.teardown.footprint import Target, take_baseline
from changeover.teardown.launch import Owned, launch

_LOOK_S = 0.2
_MEMBERS_PERIOD_S = 1.0
_PROGRESS_PERIOD_S = 1.0
_SENDER_STOP_S = 30.0


@dataclass
class Running:
    """One process of the phase: what we hold of it, and what must be gone after it."""

    owned: Owned
    target: Target


class Phase:
    """One phase of a run. :meth:`run` returns when it is done and the machine is proven clean, or raises."""

    def __init__(self, context: RunContext, index: int, spec: PhaseSpec) -> None:
        self._context = context
        self._index = index
        self._spec = spec
        self._journal = context.journal
        self._machine = context.machine
        self._running: dict[str, Running] = {}
        self._url: str | None = None
        self._members_seen = Throttle(context.machine.clock.monotonic, _MEMBERS_PERIOD_S)
        self._progress_told = Throttle(context.machine.clock.monotonic, _PROGRESS_PERIOD_S)

    def run(self) -> None:
        """Raises PhaseFailed, MachineNotClear or Interrupted; in each case the changeover has been done."""
        context, name = self._context, self._spec.name
        started_s = self._machine.clock.monotonic()
        state = context.state()
        digest = phase_digest(context.spec, self._spec, context.model, state)
        self._journal.append(
            EventName.PHASE_STARTED,
            phase=name,
            index=self._index,
            digest=digest,
            stands_on=state.last_clearance_seq,
        )
        todo = [job for job in self._spec.jobs if not self._is_finished(job)]
        if todo:
            self._do(todo)
        finished = context.state().phase(name).jobs
        self._journal.append(
            EventName.PHASE_DONE,
            phase=name,
            digest=digest,
            outputs={job: finished[job].outputs for job in finished},
            seconds=self._machine.clock.monotonic() - started_s,
        )

    def is_done(self) -> bool:
        """Whether the journal says that this phase is done, for the same question, and what it made still stands."""
        state = self._context.state()
        phase = state.phases.get(self._spec.name)
        if phase is None or not phase.done:
            return False
        if phase.digest != phase_digest(self._context.spec, self._spec, self._context.model, state):
            return False
        return all(self._is_finished(job) for job in self._spec.jobs)

    def _is_finished(self, job: JobSpec) -> bool:
        phase = self._context.state().phases.get(self._spec.name)
        done = phase.jobs.get(job.name) if phase is not None else None
        if done is None or done.digest != job_digest(self._spec.name, job):
            return False
        folder = self._context.folder.job(self._index, self._spec.name, job.name)
        return not changed_outputs(folder, done.outputs)

    def _do(self, jobs: list[JobSpec]) -> None:
        name = self._spec.name
        baseline = take_baseline(self._machine)
        self._journal.append(EventName.BASELINE_TAKEN, phase=name, baseline=baseline.to_json())
        failure: PhaseFailed | Interrupted | None = None
        try:
            if self._spec.server is not None and any(job.kind != "compare" for job in jobs):
                self._start_server()
            for job in jobs:
                self._context.check()
                self._run_job(job)
        except (PhaseFailed, Interrupted) as error:
            failure = error
        self._stop_senders()
        clearance = change_over(
            self._context, name, [running.target for running in self._running.values()], baseline
        )
        if failure is not None:
            self._journal.append(EventName.PHASE_FAILED, phase=name, reason=str(failure))
        if not clearance.clean:
            raise MachineNotClear(name, clearance) from failure
        if failure is not None:
            raise failure

    def _start_server(self) -> None:
        context, name = self._context, self._spec.name
        assert self._spec.server is not None
        folder = context.folder.server(self._index, name)
        folder.mkdir(parents=True, exist_ok=True)
        command = server_command(context, self._spec.server, folder)
        engine = get_engine(context.spec.engine.kind)
        self._journal.append(
            EventName.SERVER_STARTING,
            phase=name,
            engine=context.spec.engine.kind,
            profile=self._spec.server.profile,
            argv=command.argv,
            env=dict(command.env),
            ports=list(command.ports),
            url=command.url,
        )
        started_s = self._machine.clock.monotonic()
        log = folder / "log"
        owned = launch(
            self._machine,
            argv=list(command.argv),
            env=command.env,
            cwd=folder,
            log=log,
            cookie=context.folder.cookie(name, "server"),
        )
        target = owned.target(f"{name}/server", ports=tuple(command.ports), drain=engine.drain(command))
        self._running["server"] = Running(owned, target)
        self._url = command.url
        self._journal.append(
            EventName.SERVER_STARTED,
            phase=name,
            leader=owned.identity.to_json(),
            pid=owned.pid,
            start_ticks=owned.identity.start_ticks,
            sid=owned.sid,
            url=command.url,
            log=str(log.relative_to(context.folder.path)),
        )
        self._wait_until_ready(owned, command)
        self._journal.append(
            EventName.SERVER_READY,
            phase=name,
            seconds=self._machine.clock.monotonic() - started_s,
            url=command.url,
        )

    def _wait_until_ready(self, owned: Owned, command: ServerCommand) -> None:
        assert self._spec.server is not None

        def watch(progress: Progress) -> None:
            self._context.check()
            self._note_members()
            if self._progress_told.allows(f"server/{progress.stage}"):
                self._journal.note(
                    EventName.SERVER_LOADING, phase=self._spec.name, progress=progress_json(progress)
                )

        result = wait_ready(
            self._machine,
            owned,
            get_engine(self._context.spec.engine.kind),
            command,
            checkpoint_bytes=self._context.model.weights_bytes,
            stall_s=self._spec.server.stall_s,
            on_progress=watch,
        )
        if not result.ready:
            raise PhaseFailed(
                expected=f"the server of phase {self._spec.name} to become ready",
                seen=result.reason,
                todo=f"Its log: {owned.log}",
            )

    def _run_job(self, job: JobSpec) -> None:
        context, name = self._context, self._spec.name
        folder = context.folder.job(self._index, name, job.name)
        folder.mkdir(parents=True, exist_ok=True)
        params = job_params(context, job, folder, self._url, self._index)
        write_json(folder / "job.json", {"kind": job.kind, "params": params})
        progress = Tail(folder / "progress.jsonl")
        self._journal.append(
            EventName.JOB_STARTING, phase=name, job=job.name, kind=job.kind, files=[str(folder)], params=params
        )
        started_s = self._machine.clock.monotonic()
        owned = launch(
            self._machine,
            argv=[sys.executable, "-m", "changeover.pipeline.job", str(folder)],
            env=job_environment(job, self._url),
            cwd=folder,
            log=folder / "log",
            cookie=context.folder.cookie(name, job.name),
        )
        self._running[job.name] = Running(owned, owned.target(f"{name}/{job.name}", files=(str(folder),)))
        self._journal.append(
            EventName.JOB_STARTED,
            phase=name,
            job=job.name,
            kind=job.kind,
            leader=owned.identity.to_json(),
            pid=owned.pid,
            start_ticks=owned.identity.start_ticks,
            params=params,
        )
        status = self._follow(job, owned, progress)
        if status != 0:
            raise self._job_failed(job, owned, status)
        result = json.loads((folder / "result.json").read_text())
        self._journal.append(
            EventName.JOB_DONE,
            phase=name,
            job=job.name,
            kind=job.kind,
            digest=job_digest(name, job),
            seconds=self._machine.clock.monotonic() - started_s,
            result=result,
            outputs=record_outputs(folder, OUTPUTS[job.kind]),
        )

    def _follow(self, job: JobSpec, owned: Owned, tail: Tail) -> int:
        """Until the job ends; raises PhaseFailed where the server dies under it."""
        while True:
            status = owned.exit_code()
            for progress in read_progress(tail.lines()):
                if self._progress_told.allows(f"{job.name}/{progress.stage}"):
                    self._journal.note(
                        EventName.JOB_PROGRESS,
                        phase=self._spec.name,
                        job=job.name,
                        progress=progress_json(progress),
                    )
            if status is not None:
                return status
            self._context.check()
            self._note_members()
            self._check_server(job)
            handle = self._machine.open(owned.identity)
            if handle is not None:
                self._machine.wait([handle], _LOOK_S)
                self._machine.close(handle)

    def _check_server(self, job: JobSpec) -> None:
        server = self._running.get("server")
        status = server.owned.exit_code() if server is not None else None
        if server is None or status is None:
            return
        raise PhaseFailed(
            expected=f"the server to live while job {job.name} runs",
            seen=f"it ended with {status}; the last lines of its log:\n{log_tail(server.owned.log, 12)}",
            todo=f"The whole log: {server.owned.log}",
        )

    def _job_failed(self, job: JobSpec, owned: Owned, status: int) -> PhaseFailed:
        try:
            failure = json.loads((owned.log.parent / "failure.json").read_text())
        except FileNotFoundError:
            how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            failure = {
                "expected": "it to end with a result",
                "seen": f"it ended by {how}",
                "todo": f"Its log: {owned.log}",
            }
        reason = f"expected {failure['expected']}; saw {failure['seen']}"
        self._journal.append(
            EventName.JOB_FAILED,
            phase=self._spec.name,
            job=job.name,
            kind=job.kind,
            reason=reason,
            log_tail=log_tail(owned.log),
        )
        return PhaseFailed(
            expected=f"job {job.name} of phase {self._spec.name} to succeed: {failure['expected']}",
            seen=failure["seen"],
            todo=failure["todo"],
        )

    def _note_members(self) -> None:
        """Who descends from our processes now: later, with the same start time, that proves them ours."""
        if not self._members_seen.allows("members"):
            return
        for process, running in self._running.items():
            seen = observe(self._machine, running.target)
            if (seen.members, seen.segments) == (running.target.members, running.target.segments):
                continue
            running.target = seen
            self._journal.append(
                EventName.SERVER_MEMBERS,
                phase=self._spec.name,
                process=process,
                members=[member.to_json() for member in sorted(seen.members)],
                segments=[segment.to_json() for segment in sorted(seen.segments)],
            )

    def _stop_senders(self) -> None:
        """Jobs end before their server drains: who still sends keeps SGLang alive for ever (facts of its drain)."""
        if "server" not in self._running:
            return
        for process, running in self._running.items():
            if process == "server" or running.owned.exit_code() is not None:
                continue
            handle = self._machine.open(running.owned.identity)
            if handle is None:
                continue
            self._journal.append(
                EventName.CHANGEOVER_SIGNAL,
                phase=self._spec.name,
                pid=running.owned.pid,
                start_ticks=running.owned.identity.start_ticks,
                signal="SIGTERM",
                proof="started by this run and held since: a sender, stopped before its server drains",
            )
            self._machine.signal(handle, signal.SIGTERM)
            self._machine.wait([handle], _SENDER_STOP_S)
            self._machine.close(handle)


def progress_json(progress: Progress) -> dict[str, Any]:
    return {
        "stage": progress.stage,
        "done": progress.done,
        "total": progress.total,
        "unit": progress.unit,
        "detail": dict(progress.detail),
    }
