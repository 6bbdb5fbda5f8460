"""``changeover bench``: load a server and say how fast it was."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from changeover.cli.output import print_json, say
from changeover.cli.progress import ProgressLine
from changeover.machine.errors import InvalidInput

if TYPE_CHECKING:
    from rich.table import Table


RESULT = "result.json"


class ApiName(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"


def bench(
    url: Annotated[str, Option(help="The server, e.g. http://127.0.0.1:8000")],
    prompts: Annotated[
        Path, Option(help="JSONL with `messages`, `conversations` or `text`; or .txt, one a line.")
    ],
    model: Annotated[str | None, Option(help="The model's name. Default: ask the server.")] = None,
    concurrency: Annotated[str, Option(help="Levels: how many requests run at once.")] = "1,4",
    requests: Annotated[
        str, Option(help="Requests per level and repeat, or `all`: each prompt once.")
    ] = "16",
    max_tokens: Annotated[int, Option(help="Tokens to generate at most, per request.")] = 64,
    repeats: Annotated[int, Option(help="Repeats; an interval needs two or more.")] = 3,
    warmup: Annotated[
        int, Option(help="Requests before measuring, per level, with prompts not measured.")
    ] = 2,
    temperature: Annotated[float, Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, Option(help="Seed sent with each request.")] = 0,
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="Always generate --max-tokens (engines only).")
    ] = False,
    api: Annotated[ApiName, Option(help="The route to load.")] = ApiName.CHAT,
    timeout_s: Annotated[float, Option(help="Seconds after which a request counts as failed.")] = 600.0,
    out: Annotated[Path | None, Option(help=f"Folder for {RESULT} and requests.jsonl.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Load a server, closed loop, level by level, and print throughput and latencies."""
    from changeover.bench.records import write_result
    from changeover.bench.run import BenchParams
    from changeover.bench.run import bench as run_bench

    if out is not None and (out / RESULT).exists():
        raise InvalidInput(
            expected="a folder without a result", seen=str(out / RESULT), todo="Give another --out."
        )
    params = BenchParams(
        url=url,
        prompts=prompts,
        model=model,
        concurrency=parse_levels(concurrency),
        requests=parse_requests(requests),
        max_tokens=max_tokens,
        repeats=repeats,
        warmup=warmup,
        temperature=temperature,
        seed=seed,
        ignore_eos=ignore_eos,
        api=api.value,
        out=out,
        timeout_s=timeout_s,
    )
    with ProgressLine("bench") as show:
        result = run_bench(params, show)
    if out is not None:
        write_result(result, out / RESULT)
    if as_json:
        print_json(result)
    else:
        from rich.console import Console

        Console().print(bench_table(result))
    for warning in result["warnings"] + client_warnings(result):
        say(f"warning: {warning}")


def parse_levels(text: str) -> tuple[int, ...]:
    """``1,4,16`` as numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidInput(
            expected="levels such as 1,4,16",
            seen=text,
            todo="Give whole numbers with commas to --concurrency.",
        ) from None


def parse_requests(text: str) -> int | None:
    """A whole number; None for ``all``."""
    if text == "all":
        return None
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(
            expected="a number of requests, or `all`", seen=text, todo="Give one of the two to --requests."
        ) from None


def bench_table(result: dict[str, Any]) -> Table:
    """One row a level: means over the repeats, with half of the interval where there is one."""
    from rich import box
    from rich.table import Table

    server, load = result["server"], result["load"]
    table = Table(
        box=box.SIMPLE,
        pad_edge=False,
        padding=(0, 0, 0, 1),
        title=f"{server['model']} at {server['url']} ({server['engine']})",
        caption=f"{load['requests']} requests x {load['repeats']} repeats a level, "
        f"up to {load['max_tokens']} tokens; ± half of the 95 % interval\n"
        f"TPOT = {result['formulas']['tpot_s']}",
    )
    for heading in ("at once", "tok/s", "TTFT ms", "TPOT ms", "E2E ms", "acc. len", "failed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for level in result["levels"]:
        summary = level["summary"]
        acceptance = summary["acceptance"]
        table.add_row(
            str(level["concurrency"]),
            show_estimate(summary["output_tok_s"], 1.0),
            *(show_estimate(summary[name], 1000.0) for name in ("ttft_s", "tpot_s", "e2e_s")),
            "-" if acceptance is None else show_estimate({**acceptance, "mean": acceptance["length"]}, 1.0),
            str(sum(repeat["requests"]["failed"] for repeat in level["repeats"])),
        )
    return table


def show_estimate(estimate: dict[str, Any], scale: float) -> str:
    """``12.3 ±4%``; the mean alone where there is no interval; ``-`` where there is no figure."""
    if estimate["mean"] is None:
        return "-"
    value = f"{estimate['mean'] * scale:.4g}"
    if estimate["interval"] is None:
        return value
    low, high = estimate["interval"]
    return f"{value} ±{(high - low) / 2 / estimate['mean']:.0%}"


def client_warnings(result: dict[str, Any]) -> list[str]:
    """Where the client was too slow for its figures to be the server's alone."""
    return [
        f"repeat {repeat['repeat']} at {level['concurrency']}: {reason}"
        for level in result["levels"]
        for repeat in level["repeats"]
        for reason in repeat["validity"]["reasons"]
    ]
