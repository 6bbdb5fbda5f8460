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
    """One section a level, one row a metric."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 0, 0, 1), caption=comparison["method"])
    for heading in ("metric", "A", "B", "B / A", "95 % interval", "verdict"):
        table.add_column(heading, justify="left" if heading in ("metric", "verdict") else "right")
    names = {"output_tok_s": "tok/s", "ttft_s": "TTFT s", "tpot_s": "TPOT s", "e2e_s": "E2E s"}
    for level in comparison["levels"]:
        table.add_row(f"[bold]{level['concurrency']} at once[/bold]")
        for name, heading in names.items():
            found = level[name]
            interval = "-" if found["interval"] is None else "{:.3f} to {:.3f}".format(*found["interval"])
            figures = [_show(found[key]) for key in ("a", "b", "ratio")]
            table.add_row(f"  {heading}", *figures, interval, str(found["reason"] or found["verdict"]))
        sides = [level["acceptance"][side] for side in ("a", "b")]
        table.add_row("  acc. length", *(_show(side and side["length"]) for side in sides))
        equal = level["outputs_equal"]
        of = equal["reason"] or f"{equal['same']} of {equal['of']}"
        table.add_row("  same outputs", "", "", _show(equal["share"]), "", of, end_section=True)
    return table


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
