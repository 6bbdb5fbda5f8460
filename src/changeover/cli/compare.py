"""``changeover compare``: two benchmark results against each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from changeover.cli.output import print_json, say

if TYPE_CHECKING:
    from rich.table import Table


def compare(
    a: Annotated[Path, Argument(help="Result of the baseline.")],
    b: Annotated[Path, Argument(help="Result to compare with it.")],
    as_json: Annotated[bool, Option("--json", help="Print the comparison as one JSON object.")] = False,
) -> None:
    """Say how many times A is B, with a 95 % interval; refuses results of different loads."""
    from changeover.bench.compare import compare as run_compare
    from changeover.bench.records import read_result

    comparison = run_compare(read_result(a), read_result(b))
    if as_json:
        print_json(comparison)
        return
    from rich.console import Console

    Console().print(compare_table(comparison))
    typer.echo(comparison["sentence"])
    for caveat in comparison["caveats"]:
        say(f"caveat: {caveat}")


def compare_table(comparison: dict[str, Any]) -> Table:
    """One row a level and metric."""
    from rich.table import Table

    table = Table(caption=comparison["method"])
    for heading in ("at once", "metric", "A", "B", "B / A", "95 % interval", "verdict"):
        table.add_column(heading, justify="left" if heading in ("metric", "verdict") else "right")
    names = {"output_tok_s": "tok/s", "ttft_s": "TTFT s", "tpot_s": "TPOT s", "e2e_s": "E2E s"}
    for level in comparison["levels"]:
        at = str(level["concurrency"])
        for name, heading in names.items():
            found = level[name]
            interval = "-" if found["interval"] is None else "{:.3f} to {:.3f}".format(*found["interval"])
            table.add_row(
                at, heading, *(_show(found[key]) for key in ("a", "b", "ratio")), interval, _verdict(found)
            )
        sides = [level["acceptance"][side] for side in ("a", "b")]
        lengths = [None if side is None else side["length"] for side in sides]
        table.add_row(at, "acceptance length", *(_show(length) for length in lengths), "", "", "")
        table.add_row(
            at,
            "same outputs",
            "",
            "",
            _show(level["outputs_equal"]["share"]),
            "",
            _same(level),
            end_section=True,
        )
    return table


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _verdict(found: dict[str, Any]) -> str:
    return str(found["reason"] or found["verdict"])


def _same(level: dict[str, Any]) -> str:
    equal = level["outputs_equal"]
    return str(equal["reason"] or f"{equal['same']} of {equal['of']}")
