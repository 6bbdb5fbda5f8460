"""``changeover plan``: what a pipeline will do and what it needs, before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from changeover.cli.output import print_json


def plan(
    pipeline: Path = typer.Argument(..., help="The pipeline file."),
    overrides: list[str] = typer.Argument(None, metavar="[A.B=C]...", help="Values to change."),
    models_dir: Path = typer.Option(None, "--models-dir", help="Where built-in models are converted to."),
    as_json: bool = typer.Option(False, "--json", help="Print the plan as one JSON object."),
) -> None:
    """Say what will happen: phases, commands, ports, bytes, memory, minutes. Refuses what cannot work (exit 2)."""
    show_plan(pipeline, overrides or [], models_dir, as_json)


def show_plan(pipeline: Path, overrides: list[str], models_dir: Path | None, as_json: bool) -> None:
    from changeover.pipeline.load import load_pipeline
    from changeover.pipeline.plan import make_plan

    made = make_plan(load_pipeline(pipeline, overrides), models_dir, Path("runs"))
    if as_json:
        print_json(made.to_json())
    else:
        typer.echo(made.to_text())
    if made.refusals:
        sys.exit(2)
