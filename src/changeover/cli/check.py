"""``changeover check``: is the machine clean now? Changes nothing."""

from __future__ import annotations

from pathlib import Path

import typer

from changeover.cli.output import print_json, say


def check(
    host: str | None = typer.Option(None, "--host", help="A box over SSH, as ssh takes it."),
    ssh_config: Path | None = typer.Option(None, "--ssh-config", help="As for ssh -F."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Say what holds the machine now: runs, ports, GPUs, segments. Exit codes as for a changeover."""
    if host is None:
        from changeover.machine.local import LocalMachine
        from changeover.teardown.check import check_machine

        clearance = check_machine(LocalMachine())
    else:
        from changeover.machine.ssh import Ssh
        from changeover.teardown.remote import Box

        with Ssh(host, config=ssh_config) as ssh:
            clearance = Box(ssh).check()
    if as_json:
        print_json({**clearance.to_json(), "host": host})
    say(clearance.to_text())
    raise typer.Exit(clearance.exit_code)
