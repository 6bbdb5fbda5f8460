"""``changeover report``: a run as a page, as Markdown or as one JSON object, from its journal alone."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from changeover.cli.output import print_json, say
from changeover.machine.errors import InvalidInput


def report(
    run: str = typer.Argument(None, help="A run's id or folder; default: the newest."),
    runs_dir: Path = typer.Option(Path("runs"), "--runs-dir", help="Where runs are kept."),
    as_text: bool = typer.Option(False, "--text", help="Markdown on stdout instead of the page."),
    out: Path = typer.Option(None, "--out", help="File to write; default: report.html of the run."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object with the run's main figures."),
) -> None:
    """Write the report of a run; works while it runs and after it failed."""
    from changeover.pipeline.folder import find_run
    from changeover.pipeline.journal import read_events

    folder = find_run(run, runs_dir)
    events = read_events(folder.journal)
    if as_text:
        from changeover.report.text import render_text

        written = _write(out, render_text(events)) if out is not None else None
        if written is None and not as_json:
            typer.echo(render_text(events), nl=False)
    else:
        from changeover.report.page import render_page

        written = _write(out or folder.report, render_page(events))
    if as_json:
        from changeover.report.text import summary

        print_json({**summary(events), "written": None if written is None else str(written)})
    elif written is not None:
        say(f"wrote {written}")


def _write(path: Path, content: str) -> Path:
    """The whole file or none of it.

    Raises:
        InvalidInput: the folder is missing or cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(content, encoding="utf-8")
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InvalidInput(
            expected=f"to write {path}",
            seen=f"{error.strerror or error}",
            todo="Give another --out, in a folder that exists and can be written.",
        ) from error
    return path
