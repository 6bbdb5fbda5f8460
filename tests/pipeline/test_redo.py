"""What is done again when a run goes on, and what is not."""

from types import SimpleNamespace

import pytest

from changeover.machine.durable import replace_json
from changeover.machine.errors import InvalidInput
from changeover.pipeline.context import RunContext
from changeover.pipeline.digest import job_digest, phase_digest
from changeover.pipeline.folder import create_run
from changeover.pipeline.journal import Event
from changeover.pipeline.load import check_pipeline
from changeover.pipeline.outputs import record_outputs
from changeover.pipeline.phase import jobs_to_do
from changeover.pipeline.state import read_state
from tests.pipeline.stub.run import MODEL


@pytest.fixture
def compared(tmp_path):
    """A run whose one phase has measured (bench), then compared (compare)."""
    jobs = [
        {"kind": "bench"},
        {"kind": "command", "name": "other", "argv": ["true"]},
        {"kind": "compare", "baseline": "one/bench", "candidate": "one/bench"},
    ]
    document = {
        "name": "redo",
        "model": {"path": "/nowhere"},
        "prompts": "/nowhere",
        "phases": [{"name": "one", "server": {"profile": "production"}, "jobs": jobs}],
    }
    spec = check_pipeline(document, source="test")
    journal = SimpleNamespace(events=[])
    context = RunContext(create_run(tmp_path, "redo"), spec, MODEL, None, journal, lambda: None)
    write(context, "phase.started", phase="one", index=0, digest="d")
    for job in spec.phases[0].jobs:
        finish(context, job.name, "first")
    return context


def write(context, name, **data):
    context.journal.events.append(Event(len(context.journal.events), 0.0, 0.0, name, data))


def finish(context, name, figure):
    (job,) = (job for job in context.spec.phases[0].jobs if job.name == name)
    folder = context.folder.job(0, "one", name)
    folder.mkdir(parents=True, exist_ok=True)
    replace_json(folder / "result.json", {"figure": figure})
    digest = job_digest("one", job, read_state(context.journal.events))
    outputs = record_outputs(folder, ["result.json"])
    write(
        context, "job.done", phase="one", job=name, kind=job.kind, digest=digest, result={}, outputs=outputs
    )


def to_do(context):
    return [job.name for job in jobs_to_do(context, context.spec.phases[0], 0)]


def test_what_stands_is_not_done_again(compared):
    assert to_do(compared) == []


def test_a_comparison_is_made_again_with_the_benchmark_that_it_compares(compared):
    (compared.folder.job(0, "one", "bench") / "result.json").write_text("{}")
    assert to_do(compared) == ["bench", "compare"]


def test_a_crash_between_the_two_does_not_leave_the_old_comparison(compared):
    finish(compared, "bench", "second")
    assert to_do(compared) == ["compare"]


def test_prompts_that_are_gone_are_asked_for_by_name(compared):
    state = read_state(compared.journal.events)
    with pytest.raises(InvalidInput, match="prompts at /nowhere; saw No such file") as caught:
        phase_digest(compared.spec, compared.spec.phases[0], MODEL, state)
    assert caught.value.exit_code == 2
