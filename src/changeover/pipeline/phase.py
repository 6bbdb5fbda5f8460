"""Doing one phase: baseline, server, jobs, and the changeover that proves the machine clean behind it."""

from __future__ import annotations

from changeover.pipeline.ahead import working_ahead
from changeover.pipeline.changeover import change_over
from changeover.pipeline.context import MachineNotClear, RunContext
from changeover.pipeline.digest import job_digest, phase_digest, stands_on
from changeover.pipeline.journal import EventName
from changeover.pipeline.outputs import changed_outputs
from changeover.pipeline.processes import PhaseProcesses
from changeover.pipeline.serving import hold_server, start_server
from changeover.pipeline.spec import HoldJob, JobSpec, PhaseSpec
from changeover.pipeline.working import run_job
from changeover.teardown.budgets import Budgets
from changeover.teardown.claim import expect_as_cleared
from changeover.teardown.footprint import Baseline, take_baseline


def is_phase_done(context: RunContext, phase: PhaseSpec, index: int) -> bool:
    """Whether the journal says so, for this very question, and what the phase made still stands as it was written."""
    state = context.state()
    done = state.phases.get(phase.name)
    if (
        done is None
        or not done.done
        or done.digest != phase_digest(context.spec, phase, context.model, state)
    ):
        return False
    return all(_is_finished(context, phase, index, job) for job in phase.jobs)


def run_phase(context: RunContext, phase: PhaseSpec, index: int) -> None:
    """Do what is left of a phase; when this returns it is done and the machine is proven clean.

    Raises PhaseFailed, MachineNotClear or Interrupted; in each case the changeover has been done.
    """
    started_s = context.machine.clock.monotonic()
    state = context.state()
    digest = phase_digest(context.spec, phase, context.model, state)
    context.journal.append(
        EventName.PHASE_STARTED,
        phase=phase.name,
        index=index,
        digest=digest,
        stands_on=state.last_clearance_seq,
    )
    todo = jobs_to_do(context, phase, index)
    if todo:
        _do(context, phase, index, todo)
    finished = context.state().phase(phase.name).jobs
    context.journal.append(
        EventName.PHASE_DONE,
        phase=phase.name,
        digest=digest,
        outputs={name: job.outputs for name, job in finished.items()},
        seconds=context.machine.clock.monotonic() - started_s,
    )


def jobs_to_do(context: RunContext, phase: PhaseSpec, index: int) -> list[JobSpec]:
    """What is not finished, and what stands on it: a comparison is not finished when its benchmark is done again."""
    todo: list[JobSpec] = []
    for job in phase.jobs:
        again = stands_on(phase.name, job) & {other.name for other in todo}
        if again or not _is_finished(context, phase, index, job):
            todo.append(job)
    return todo


def _is_finished(context: RunContext, phase: PhaseSpec, index: int, job: JobSpec) -> bool:
    state = context.state()
    done = state.phases[phase.name].jobs.get(job.name) if phase.name in state.phases else None
    if done is None or done.digest != job_digest(phase.name, job, state):
        return False
    return not changed_outputs(context.folder.job(index, phase.name, job.name), done.outputs)


def _expect_as_cleared(context: RunContext, baseline: Baseline) -> None:
    """Against the run's first baseline of this boot: what came in between would be called clean ever after."""
    taken = (phase.baseline for phase in context.state().phases.values() if phase.baseline is not None)
    earlier = (Baseline.from_json(one) for one in taken)
    first = next((one for one in earlier if one.boot_id == baseline.boot_id), None)
    if first is not None:
        expect_as_cleared(first, baseline, Budgets().tolerance_mib)


def _do(context: RunContext, phase: PhaseSpec, index: int, jobs: list[JobSpec]) -> None:
    baseline = take_baseline(context.machine)
    _expect_as_cleared(context, baseline)
    context.journal.append(EventName.BASELINE_TAKEN, phase=phase.name, baseline=baseline.to_json())
    processes = PhaseProcesses(context, phase.name)
    with context.machine.watching_gpus():  # entered before it is needed: a changeover begins with a reading
        _do_and_clear(context, phase, index, jobs, processes, baseline)


def _do_and_clear(
    context: RunContext,
    phase: PhaseSpec,
    index: int,
    jobs: list[JobSpec],
    processes: PhaseProcesses,
    baseline: Baseline,
) -> None:
    failure: BaseException | None = None
    try:
        url = None
        if phase.server is not None and any(job.kind != "compare" for job in jobs):
            url = start_server(context, index, phase.name, phase.server, processes)
        for job in jobs:
            context.check()
            if isinstance(job, HoldJob):
                hold_server(context, phase.name, processes)
            with working_ahead(context, index, phase.name, job, processes):
                run_job(context, index, phase.name, job, url, processes)
    except BaseException as error:  # noqa: BLE001 - raised again below: whatever it was, nothing of ours stays behind
        failure = error
    processes.stop_senders()
    clearance = change_over(
        context.journal, context.machine, context.spec.teardown, phase.name, processes.targets(), baseline
    )
    if failure is not None:
        reason = str(failure) or type(failure).__name__
        context.journal.try_append(EventName.PHASE_FAILED, phase=phase.name, reason=reason)
    if not clearance.clean:
        raise MachineNotClear(phase.name, clearance) from failure
    if failure is not None:
        raise failure
