"""``changeover plan``: what a pipeline will do and what it needs, before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from changeover.cli.options import MODELS_DIR, OVERRIDES, RUNS_DIR
from changeover.cli.output import print_json


def plan(
    pipeline: Path = typer.Argument(..., help="The pipeline file."),
    overrides: list[str] = OVERRIDES,
    models_dir: Path = MODELS_DIR,
    runs_dir: Path = RUNS_DIR,
    as_json: bool = typer.Option(False, "--json", help="Print the plan as one JSON object."),
) -> None:
    """Say what will happen: phases, commands, ports, bytes, memory, minutes. Refuses what cannot work (exit 2)."""
    show_plan(pipeline, overrides or [], models_dir, runs_dir, as_json)


def show_plan(
    pipeline: Path, overrides: list[str], models_dir: Path | None, runs_dir: Path, as_json: bool
) -> None:
    from changeover.pipeline.load import load_pipeline
    from changeover.pipeline.plan import make_plan
    from changeover.pipeline.plan_text import plan_text

    made = make_plan(load_pipeline(pipeline, overrides), models_dir, runs_dir)
    if as_json:
        print_json(made.to_json())
    else:
        typer.echo(plan_text(made))
    if made.refusals:
        sys.exit(2)
