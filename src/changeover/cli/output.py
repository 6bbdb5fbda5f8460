"""How commands speak: one JSON object on stdout with ``--json``, text for people on stderr or stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from changeover.machine.errors import ChangeoverError


def print_json(value: Any) -> None:
    """The one object that ``--json`` promises; strict JSON (no NaN, no Infinity)."""
    typer.echo(json.dumps(value, allow_nan=False, indent=2, sort_keys=True))


def say(text: str) -> None:
    """A line for people; never on stdout, which belongs to results."""
    typer.echo(text, err=True)


def show_error(error: ChangeoverError, *, as_json: bool) -> None:
    if as_json:
        print_json(error.to_json())
    say(f"error: expected {error.expected}")
    say(f"       saw      {error.seen}")
    say(f"       next     {error.todo}")


def is_terminal() -> bool:
    return sys.stderr.isatty()
