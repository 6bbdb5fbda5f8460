"""``changeover patch``: the capture patch of SGLang's model files: what it would do, put in, taken out."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from changeover.cli.output import print_json, say
from changeover.engines.patch.in_place import Change, apply_in_place, restore_in_place
from changeover.engines.patch.installed import USABLE, Installed, find_sglang, model_files
from changeover.engines.patch.overlay import build_overlay, read_overlay, remove_overlay
from changeover.engines.patch.source import SourceState
from changeover.engines.protocol import SIDE
from changeover.engines.versions import PATCH_READ, parsed
from changeover.machine.clock import SystemClock
from changeover.machine.errors import NotSupported
from changeover.machine.folders import state_folder

app = typer.Typer(
    help="SGLang's model files: the patch that lets them capture hidden states.", no_args_is_help=True
)

PythonOption = Annotated[str, Option(help="The interpreter of the environment that SGLang is installed in.")]
JsonOption = Annotated[bool, Option("--json", help="Print one JSON object.")]


@app.command()
def status(python: PythonOption = sys.executable, as_json: JsonOption = False) -> None:
    """What each model file is: original, patched, edited, unknown. Changes nothing."""
    installed = find_sglang(python)
    files = model_files(installed)
    overlay = overlay_folder(installed)
    copied = read_overlay(overlay)
    if as_json:
        print_json(
            {
                **_facts(installed),
                "files": [
                    {"name": it.name, "state": it.state.value, "as_installed": it.as_installed}
                    for it in files
                ],
                "overlay": {"folder": str(overlay), "files": copied} if copied is not None else None,
            }
        )
        return
    typer.echo(f"SGLang {installed.version} in {installed.package}{_unread(installed)}")
    for it in files:
        same = {True: ", as it was installed", False: ", not as it was installed", None: ""}[it.as_installed]
        typer.echo(f"  {it.name:24} {it.state.value}{same}")
    typer.echo(
        f"copy    {overlay}: {', '.join(copied)}" if copied is not None else f"copy    none in {overlay}"
    )


@app.command()
def apply(
    python: PythonOption = sys.executable,
    in_place: Annotated[
        bool, Option("--in-place", help="Change the installed files, not a copy beside them.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Put the patch in: in a copy, which is used by those who put it on their path; says how."""
    installed = find_sglang(python)
    files = model_files(installed)
    if not any(it.state in USABLE for it in files):
        raise NotSupported(
            expected=f"a model file that the patch knows in {installed.models}",
            seen=f"SGLang {installed.version}: "
            + ("; ".join(f"{it.name} {it.state.value}" for it in files) or "none of the families' files"),
            todo="Use a version that it knows (0.5.6 to 0.5.23 were read), or `--forward-hooks`, which 0.5.6 and newer "
            "have.",
        )
    if in_place:
        changes = apply_in_place(installed, journal_path(installed), SystemClock())
        first_on_path = SIDE
    else:
        overlay = overlay_folder(installed)
        names = build_overlay(installed, overlay)
        changes = [Change(name, SourceState.PATCHED, "patched in the copy") for name in names]
        changes += [Change(it.name, it.state, "left alone") for it in files if it.state not in USABLE]
        first_on_path = overlay
    path = os.pathsep.join(dict.fromkeys((str(first_on_path), str(SIDE))))
    _show(installed, changes, as_json, environment={"PYTHONPATH": path})


@app.command()
def restore(python: PythonOption = sys.executable, as_json: JsonOption = False) -> None:
    """Take the patch out: every installed file byte for byte what it was, and the copy removed."""
    installed = find_sglang(python)
    changes = restore_in_place(installed, journal_path(installed), SystemClock())
    overlay = overlay_folder(installed)
    removed = remove_overlay(overlay)
    _show(installed, changes, as_json, environment={})
    if removed:
        say(f"removed {overlay}")
    if any(change.state is SourceState.EDITED for change in changes):
        raise typer.Exit(6)


def overlay_folder(installed: Installed) -> Path:
    return state_folder("overlays") / f"sglang-{installed.version}-{_place(installed)}"


def journal_path(installed: Installed) -> Path:
    return state_folder("patches") / f"{_place(installed)}.jsonl"


def _place(installed: Installed) -> str:
    return hashlib.sha256(str(installed.package.resolve()).encode()).hexdigest()[:12]


def _facts(installed: Installed) -> dict[str, object]:
    return {
        "package": str(installed.package),
        "version": installed.version,
        "version_read": parsed(installed.version) in PATCH_READ,
    }


def _unread(installed: Installed) -> str:
    read = parsed(installed.version) in PATCH_READ
    return "" if read else " (not one of the versions that the patch was tried on)"


def _show(installed: Installed, changes: list[Change], as_json: bool, *, environment: dict[str, str]) -> None:
    if as_json:
        files = [{"name": it.name, "state": it.state.value, "note": it.note} for it in changes]
        print_json({**_facts(installed), "files": files, "environment": environment})
        return
    typer.echo(f"SGLang {installed.version} in {installed.package}{_unread(installed)}")
    for it in changes:
        typer.echo(f"  {it.name:24} {it.state.value}: {it.note}")
    if environment:
        typer.echo("It does nothing without these in the server's environment:")
        for name, value in environment.items():
            typer.echo(f"  {name}={shlex.quote(value)}")
        typer.echo('  CHANGEOVER_CAPTURE=\'{"folder": FOR_THE_STATES, "boundaries": [2, 15, 27]}\'')
