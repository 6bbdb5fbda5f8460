"""The ``changeover`` command: puts the commands together and turns errors into words and exit codes."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from changeover import __version__
from changeover.cli import (
    bench,
    check,
    clear,
    compare,
    drafter,
    patch,
    plan,
    report,
    run,
    serve,
    states,
    status,
)
from changeover.cli.output import show_error
from changeover.machine.errors import ChangeoverError, InvalidInput

app = typer.Typer(
    name="changeover",
    help="Run the phases of an LLM box one after the other, and prove between each two that the machine is clean.",
    rich_markup_mode=None,  # plain help: rich would double the time that it takes
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"changeover {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


app.command("run")(run.run)
app.command("plan")(plan.plan)
app.command("status")(status.status)
app.command("attach")(status.attach)
app.command("stop")(status.stop)
app.command("clear")(clear.clear)
app.command("check")(check.check)
app.command("serve")(serve.serve)
app.command("bench")(bench.bench)
app.command("compare")(compare.compare)
app.command("report")(report.report)
app.add_typer(states.app, name="states")
app.add_typer(drafter.app, name="drafter")
app.add_typer(patch.app, name="patch")


def main() -> None:
    """Entry point; returns to the shell with the exit codes of docs/design.md."""
    try:
        app()
    except ChangeoverError as error:
        _fail(error)
    except OSError as error:  # a folder that is not there or not ours; a run's own are in its journal
        _fail(
            InvalidInput(
                expected="files and folders that can be read and written",
                seen=f"{type(error).__name__}: {error}",
                todo="Correct what is named there, or give another --runs-dir or --models-dir.",
            )
        )


def _fail(error: ChangeoverError) -> NoReturn:
    show_error(error, as_json="--json" in sys.argv)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
