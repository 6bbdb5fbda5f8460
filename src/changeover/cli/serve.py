"""``changeover serve``: one server in the foreground; leaving it clears the machine."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

from changeover.cli.options import MODELS_DIR, RUNS_DIR


class ProfileName(StrEnum):
    """How a server is started."""

    PRODUCTION = "production"
    CAPTURE = "capture"
    SPECULATIVE = "speculative"


def serve(
    profile: ProfileName = typer.Argument(..., help="How the server is started."),
    model: str = typer.Option(
        "smollm2-135m-instruct", "--model", help="A Hugging Face folder or a built-in name."
    ),
    engine: str = typer.Option("embedded", "--engine", help="embedded, sglang or vllm."),
    port: int = typer.Option(None, "--port", help="Default: a free one."),
    drafter: Path = typer.Option(None, "--drafter", help="Profile speculative: an exported drafter."),
    draft_tokens: int = typer.Option(3, "--draft-tokens", help="Profile speculative."),
    runs_dir: Path = RUNS_DIR,
    models_dir: Path = MODELS_DIR,
) -> None:
    """Start one server, show its loading, keep it up until Ctrl-C, then clear the machine and prove it (exit 130)."""
    from changeover.cli.terminal import make_view
    from changeover.engines.models import resolve_model
    from changeover.machine.local import LocalMachine
    from changeover.pipeline.folder import create_run
    from changeover.pipeline.load import check_pipeline
    from changeover.pipeline.plan import make_plan, refuse_if_impossible
    from changeover.pipeline.runner import start_run

    server: dict[str, Any] = {"profile": profile.value, "port": port}
    if profile is ProfileName.SPECULATIVE:
        server |= {"drafter": str(drafter.resolve()) if drafter else None, "draft_tokens": draft_tokens}
    spec = check_pipeline(
        {
            "name": "serve",
            "model": {"path": model},
            "prompts": "",
            "engine": {"kind": engine},
            "phases": [{"name": "serve", "server": server, "jobs": [{"kind": "hold"}]}],
        },
        source="the command line",
    )
    refuse_if_impossible(make_plan(spec, models_dir, runs_dir))
    facts = resolve_model(model, models_dir)
    view = make_view()
    try:
        sys.exit(
            start_run(create_run(runs_dir, "serve"), spec, facts, LocalMachine(adopt_orphans=True), view)
        )
    finally:
        view.close()
