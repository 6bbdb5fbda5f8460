"""``changeover check``: is the machine clean now? Changes nothing."""

from __future__ import annotations

import typer

from changeover.cli.output import print_json, say


def check(as_json: bool = typer.Option(False, "--json", help="Print one JSON object.")) -> None:
    """Say what holds the machine now: runs, ports, GPUs, segments. Exit codes as for a changeover."""
    from changeover.machine.local import LocalMachine
    from changeover.teardown.check import check_machine

    clearance = check_machine(LocalMachine())
    if as_json:
        print_json(clearance.to_json())
    say(clearance.to_text())
    raise typer.Exit(clearance.exit_code)
