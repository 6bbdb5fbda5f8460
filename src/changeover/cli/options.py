"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path

import typer

RUNS_DIR = typer.Option(Path("runs"), "--runs-dir", help="Where runs are kept.")
MODELS_DIR = typer.Option(
    None,
    "--models-dir",
    help="Where built-in models are converted to (default: $CHANGEOVER_MODELS or ~/.cache).",
)
OVERRIDES = typer.Argument(
    None, metavar="[A.B=C]...", help="Values to change, e.g. phases.baseline.jobs.bench.repeats=5"
)
