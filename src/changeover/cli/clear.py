"""``changeover clear``: the graduated teardown, of a run that was left behind or of a server that somebody started."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from changeover.cli.output import print_json, say
from changeover.machine.errors import InvalidInput

if TYPE_CHECKING:
    from changeover.cli.clear_remote import Asked
    from changeover.machine.protocol import Machine
    from changeover.teardown.adoption import Tree
    from changeover.teardown.budgets import Budgets
    from changeover.teardown.inventory import Inventory


def clear(
    run: str | None = typer.Option(None, "--run", help="A run's id: its processes are proven ours."),
    pid: list[int] = typer.Option([], "--pid", help="The tree of this process (repeatable)."),
    port: list[int] = typer.Option([], "--port", help="The server that listens there (repeatable)."),
    engine: str | None = typer.Option(
        None, "--engine", help="Every server of sglang, vllm or embedded, orphans of dead ones too."
    ),
    yes: bool = typer.Option(False, "--yes", help="Do not ask before a server of somebody else is taken."),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Say who would be stopped, with the proof; stop nobody."
    ),
    stop: Literal["graceful", "fast"] = typer.Option(
        "graceful", "--stop", help="fast: a server that is proven idle is spared its own slow shutdown."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    total_timeout: float = typer.Option(
        600.0, "--total-timeout", help="Most seconds for everything together."
    ),
    drain_timeout: float = typer.Option(
        60.0, "--drain-timeout", help="Most seconds for requests in flight to end; then they are cut off."
    ),
    terminate_timeout: float = typer.Option(
        60.0, "--terminate-timeout", help="Most seconds for a server's own shutdown; then SIGKILL."
    ),
    api_key_env: str | None = typer.Option(
        None, "--api-key-env", help="The environment variable that holds the server's API key."
    ),
    runs_dir: Path = typer.Option(Path("runs"), "--runs-dir", help="Where the runs are."),
    host: str | None = typer.Option(None, "--host", help="On a box over SSH, as ssh takes it."),
    attach: str | None = typer.Option(
        None, "--attach", help="With --host: come back to a clear that goes on there, by its id."
    ),
    ssh_config: Path | None = typer.Option(None, "--ssh-config", help="As for ssh -F."),
) -> None:
    """Stop a server or what a run left behind, and prove the machine clean."""
    from changeover.cli import clear_remote
    from changeover.machine.local import LocalMachine
    from changeover.teardown.adoption import Wish
    from changeover.teardown.budgets import Budgets
    from changeover.teardown.engine_processes import ENGINE_PROCESSES
    from changeover.teardown.footprint import StopPolicy

    wish = Wish(tuple(pid), tuple(port), engine)
    if attach is not None:
        clear_remote.attach(host, ssh_config, attach, as_json=as_json)
    if (run is None) == (wish == Wish()):
        raise InvalidInput(
            expected="--run ID, or one or more of --pid, --port and --engine",
            seen="both" if run is not None else "neither",
            todo="`changeover status` lists the runs; `changeover check` shows what holds the machine.",
        )
    if engine is not None and engine not in ENGINE_PROCESSES:
        raise InvalidInput(
            expected=f"--engine {', '.join(ENGINE_PROCESSES)}",
            seen=engine,
            todo="For anything else name the process: --pid or --port.",
        )
    budgets = Budgets(
        total_s=total_timeout,
        drain_s=drain_timeout,
        drain_cap_s=drain_timeout,
        terminate_s=terminate_timeout,
    )
    if host is not None:
        if run is not None:
            raise InvalidInput(
                expected="--pid, --port or --engine with --host",
                seen=f"--run {run}",
                todo=f"A run's folder is on the box that it ran on: ssh {host} changeover clear --run {run}",
            )
        asked = clear_remote.Asked(wish, budgets, StopPolicy(stop), _api_key(api_key_env))
        clear_remote.clear(host, ssh_config, asked, yes=yes, dry_run=dry_run, as_json=as_json)
    machine = LocalMachine()
    if run is not None:
        _clear_run(runs_dir / run, machine, budgets, dry_run=dry_run, as_json=as_json)
    else:
        asked = clear_remote.Asked(wish, budgets, StopPolicy(stop), _api_key(api_key_env))
        with machine.watching_gpus():  # the driver is entered while the servers are looked for
            _clear_servers(machine, asked, yes=yes, dry_run=dry_run, as_json=as_json)


def _clear_run(run_dir: Path, machine: Machine, budgets: Budgets, *, dry_run: bool, as_json: bool) -> None:
    from changeover.pipeline.clear_run import clear_run, inventory_of_run

    if dry_run:
        inventory = inventory_of_run(run_dir, machine)
        if as_json:
            print_json(inventory.to_json())
        _say_inventory(inventory)
        return
    clearance = clear_run(run_dir, machine, budgets)
    if as_json:
        print_json(clearance.to_json())
    say(clearance.to_text())
    raise typer.Exit(clearance.exit_code)


def _clear_servers(machine: Machine, asked: Asked, *, yes: bool, dry_run: bool, as_json: bool) -> None:
    from changeover.teardown.adoption import find_trees
    from changeover.teardown.audit import Audit, audit_folder, new_audit_id
    from changeover.teardown.clear_adopted import clear_adopted

    trees = find_trees(machine, asked.wish)
    for tree in trees:
        say(tree.to_text())
    if not trees:
        say(f"no process of {asked.wish.engine} on this machine")
    if dry_run:
        if as_json:
            print_json({"trees": [tree.to_json() for tree in trees]})
        return
    willing = expect_consent(trees, yes=yes)
    audit = Audit(audit_folder() / f"{new_audit_id()}.jsonl", machine.clock)
    try:
        clearance = clear_adopted(
            machine, asked.wish, willing, audit, budgets=asked.budgets, stop=asked.stop, token=asked.token
        )
    finally:
        audit.close()
    if as_json:
        said = {"audit": str(audit.path), "trees": [tree.to_json() for tree in willing]}
        print_json({**clearance.to_json(), **said})
    say(clearance.to_text())
    say(f"audit: {audit.path}")
    raise typer.Exit(clearance.exit_code)


def expect_consent(trees: tuple[Tree, ...], *, yes: bool) -> tuple[Tree, ...]:
    """The trees that may be taken, after the user has said so; raises InvalidInput or TreeRefused otherwise."""
    from changeover.teardown.clear_adopted import expect_willing

    willing = tuple(tree for tree in trees if not tree.refusal)
    if not willing:
        expect_willing(trees)
    if willing and not yes:
        count = sum(len(tree.members) for tree in willing)
        if not sys.stdin.isatty():
            raise InvalidInput(
                expected="your word that these processes may be stopped: --yes, or an answer on a terminal",
                seen="no terminal to ask on",
                todo="Look at the trees above, then repeat the command with --yes.",
            )
        typer.confirm(f"stop these {count} processes", abort=True, err=True)
    return willing


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if variable not in os.environ:
        raise InvalidInput(
            expected=f"the server's API key in the environment variable {variable}",
            seen="no such variable",
            todo="Export it, or leave --api-key-env away: the drain then goes without the server's own figures.",
        )
    return os.environ[variable]


def _say_inventory(inventory: Inventory) -> None:
    say(f"{len(inventory.alive)} processes of this run alive")
    for one in inventory.alive:
        left_alone = f"; would be left alone: {one.refusal}" if one.refusal else ""
        what = f"pid {one.process.pid} ({one.process.comm}), {one.role} of {one.target}"
        say(f"  {what}: {one.proof.value}{left_alone}")
    for refusal in inventory.refusals:
        say(f"  left alone: pid {refusal.pid} ({refusal.comm}): {refusal.reason}")
