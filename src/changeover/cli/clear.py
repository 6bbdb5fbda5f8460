"""``changeover clear``: the graduated teardown of a run that was left behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from changeover.cli.output import print_json, say

if TYPE_CHECKING:
    from changeover.teardown.inventory import Inventory


def clear(
    run: str | None = typer.Option(None, "--run", help="The run's id: its processes are proven ours."),
    runs_dir: Path = typer.Option(Path("runs"), "--runs-dir", help="Where the runs are."),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Say who would be stopped, with the proof; stop nobody."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    total_timeout: float = typer.Option(
        600.0, "--total-timeout", help="Most seconds for everything together."
    ),
    pid: int | None = typer.Option(None, "--pid", help="Adopt a process (not yet possible)."),
    port: int | None = typer.Option(None, "--port", help="Adopt who listens there (not yet possible)."),
    engine: str | None = typer.Option(
        None, "--engine", help="Adopt an engine's processes (not yet possible)."
    ),
) -> None:
    """Stop what a run left on the machine, and prove the machine clean."""
    from changeover.machine.errors import InvalidInput
    from changeover.teardown.ownership import refuse_adoption

    for option, value in (("--pid", pid), ("--port", port), ("--engine", engine)):
        if value is not None:
            raise refuse_adoption(f"{option} {value}")
    if run is None:
        raise InvalidInput(
            expected="--run ID",
            seen="nothing",
            todo="`changeover status` lists the runs; `changeover check` looks.",
        )
    from changeover.machine.local import LocalMachine
    from changeover.pipeline.clear_run import clear_run, inventory_of_run
    from changeover.teardown.budgets import Budgets

    machine = LocalMachine()
    if dry_run:
        inventory = inventory_of_run(runs_dir / run, machine)
        if as_json:
            print_json(inventory.to_json())
        _say_inventory(inventory)
        return
    clearance = clear_run(runs_dir / run, machine, Budgets(total_s=total_timeout))
    if as_json:
        print_json(clearance.to_json())
    say(clearance.to_text())
    raise typer.Exit(clearance.exit_code)


def _say_inventory(inventory: Inventory) -> None:
    say(f"{len(inventory.alive)} processes of this run alive")
    for one in inventory.alive:
        left_alone = f"; would be left alone: {one.refusal}" if one.refusal else ""
        what = f"pid {one.process.pid} ({one.process.comm}), {one.role} of {one.target}"
        say(f"  {what}: {one.proof.value}{left_alone}")
    for refusal in inventory.refusals:
        say(f"  left alone: pid {refusal.pid} ({refusal.comm}): {refusal.reason}")
