"""``changeover run``: do the phases of a pipeline."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import typer

from changeover.cli.options import MODELS_DIR, OVERRIDES, RUNS_DIR
from changeover.cli.output import print_json, say
from changeover.machine.errors import InvalidInput, NotSupported


def run(
    pipeline: Path = typer.Argument(
        None, help="The pipeline file (with --resume: also a run's id or folder; default the newest run)."
    ),
    overrides: list[str] = OVERRIDES,
    resume: bool = typer.Option(False, "--resume", help="Go on with a run that was cut off or failed."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print what would happen; start nothing."),
    host: str = typer.Option(None, "--host", help="Run on another machine over SSH (not in this version)."),
    runs_dir: Path = RUNS_DIR,
    models_dir: Path = MODELS_DIR,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object about the run at its end."),
) -> None:
    """Run the phases of a pipeline, one after the other, with a proven clean machine between each two."""
    if host is not None:
        raise NotSupported(
            expected="a run on this machine",
            seen=f"--host {host}",
            todo="Log in there and run it there for now.",
        )
    if resume:
        _resume(pipeline, overrides or [], runs_dir, models_dir, as_json)
        return
    if pipeline is None:
        raise InvalidInput(
            expected="a pipeline file", seen="none", todo="Try `changeover run examples/laptop.yaml`."
        )
    if dry_run:
        from changeover.cli.plan import show_plan

        show_plan(pipeline, overrides or [], models_dir, runs_dir, as_json)
        return
    from changeover.cli.terminal import make_view
    from changeover.engines.models import resolve_model
    from changeover.machine.local import LocalMachine
    from changeover.pipeline.folder import create_run
    from changeover.pipeline.load import load_pipeline
    from changeover.pipeline.plan import make_plan, refuse_if_impossible
    from changeover.pipeline.runner import start_run

    spec = load_pipeline(pipeline, overrides or [])
    refuse_if_impossible(make_plan(spec, models_dir, runs_dir))
    model = resolve_model(spec.model.path, models_dir, on_progress=_say_conversion)
    folder = create_run(runs_dir, spec.name)
    view = make_view()
    try:
        exit_code = start_run(folder, spec, model, LocalMachine(adopt_orphans=True), view)
    finally:
        view.close()
    _end(folder.path, exit_code, as_json)


def _resume(
    reference: Path | None, overrides: list[str], runs_dir: Path, models_dir: Path | None, as_json: bool
) -> None:
    from changeover.cli.terminal import make_view
    from changeover.engines.models import resolve_model
    from changeover.machine.local import LocalMachine
    from changeover.pipeline.folder import find_run, newest_run_of
    from changeover.pipeline.load import load_pipeline
    from changeover.pipeline.runner import resume_run

    if overrides:
        raise InvalidInput(
            expected="no overrides with --resume: a run goes on with the pipeline that it was started with",
            seen=" ".join(overrides),
            todo="Leave them out, or start a new run.",
        )
    # `run laptop.yaml --resume` means the newest run of that pipeline, `run ID --resume` that one
    if reference is not None and reference.suffix in (".yaml", ".yml"):
        folder = newest_run_of(load_pipeline(reference).name, runs_dir)
        say(
            f"{folder.run_id} goes on with the pipeline that it was started with, whatever {reference} says now"
        )
    else:
        folder = find_run(None if reference is None else str(reference), runs_dir)
    view = make_view()
    try:
        exit_code = resume_run(
            folder,
            lambda spec: resolve_model(spec.model.path, models_dir, on_progress=_say_conversion),
            LocalMachine(adopt_orphans=True),
            view,
        )
    finally:
        view.close()
    _end(folder.path, exit_code, as_json)


def _say_conversion(progress: object) -> None:
    stage = getattr(progress, "stage", "")
    say(f"model: {stage}")


def _end(run_dir: Path, exit_code: int, as_json: bool) -> None:
    from changeover.pipeline.journal import read_events
    from changeover.pipeline.state import read_state

    state = read_state(read_events(run_dir / "journal.jsonl"))
    report = run_dir / "report.html"
    if as_json:
        print_json(
            {
                "run_id": state.run_id,
                "run_dir": str(run_dir),
                "verdict": state.verdict.value,
                "reason": state.reason,
                "exit_code": exit_code,
                "seconds": state.seconds,
                "phases": {phase.name: phase.done for phase in state.phases.values()},
                "report": str(report) if report.is_file() else None,
            }
        )
    say(f"report: {report}")
    if exit_code:
        say(f"go on with: changeover run --resume {shlex.quote(str(run_dir))}")
    sys.exit(exit_code)
