"""``changeover states``: collect hidden states from a capture server, check a folder of them, describe it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from changeover.cli.output import print_json, say
from changeover.cli.progress import ProgressLine
from changeover.cli.states_convert import convert, probe
from changeover.machine.errors import ChangeoverError, InvalidInput

if TYPE_CHECKING:
    from changeover.states.reader import StatesReader
    from changeover.states.verify import Verification

app = typer.Typer(help="Hidden states: collect, verify, inspect, probe, convert.", no_args_is_help=True)
app.command("probe")(probe)
app.command("convert")(convert)


@app.command()
def collect(
    url: Annotated[str, Option(help="The capture server, e.g. http://127.0.0.1:8000")],
    prompts: Annotated[Path, Option(help="JSONL with `messages`, `conversations` or `text`; or .txt.")],
    model: Annotated[str, Option(help="The target: its folder, or a built-in name.")],
    capture_dir: Annotated[Path, Option(help="The folder that the server got as --capture-dir.")],
    out: Annotated[Path, Option(help="The states folder; an existing one is resumed.")],
    boundaries: Annotated[
        str | None, Option(help="As the server's --aux-boundaries. Default: 2, L // 2, L - 3.")
    ] = None,
    limit: Annotated[int | None, Option(help="Prompts to take; default: all.")] = None,
    max_tokens: Annotated[int, Option(help="Tokens of an answer at most.")] = 128,
    concurrency: Annotated[int, Option(help="Requests at once.")] = 8,
    held_out: Annotated[float, Option(help="Share of prompts kept from training.")] = 0.1,
    codec: Annotated[
        str, Option(help="none, or bytesplit-zstd1 (lossless, about 0.7 of the size).")
    ] = "none",
    staging_mib: Annotated[int, Option(help="Captured files that may wait to be stored.")] = 512,
    reserve_mib: Annotated[int, Option(help="Stop, resumable, before less than this is free.")] = 1024,
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Let the model answer the prompts and store the states of prompt and answer."""
    from changeover.engines.models import default_models_dir, resolve_model
    from changeover.states.collect import collect as run_collect
    from changeover.states.conventions import default_boundaries
    from changeover.states.params import CollectParams

    facts = resolve_model(model, default_models_dir())
    params = CollectParams.from_json(
        {
            "url": url,
            "prompts": prompts,
            "out": out,
            "capture_dir": capture_dir,
            "model_path": facts.path,
            "model_name": model,
            "model_sha256": facts.sha256,
            "hidden": facts.hidden,
            "layers": facts.layers,
            "vocab": facts.vocab,
            "boundaries": default_boundaries(facts.layers) if boundaries is None else numbers(boundaries),
            "limit": limit,
            "max_tokens": max_tokens,
            "concurrency": concurrency,
            "held_out_fraction": held_out,
            "codec": codec,
            "staging_budget_bytes": staging_mib * 2**20,
            "disk_reserve_bytes": reserve_mib * 2**20,
        }
    )
    with ProgressLine("collect") as show:
        result = run_collect(params, show)
    if as_json:
        print_json(result)
        return
    typer.echo(
        f"{result['samples']} samples ({result['held_out']} held out), {result['tokens']:,} tokens, "
        f"{_size(result['bytes'])} in {result['states']}"
    )
    typer.echo(
        f"{result['asked']} asked in {result['collect_seconds']:.0f} s, {result['failed']} failed; "
        f"probe: {result['probe']['agreement']:.2%} of {result['probe']['rows']} rows; sealed"
    )
    for failure in result["failures"]:
        say(f"failed: {failure['id']}: {failure['reason']}")


@app.command()
def verify(
    folder: Annotated[Path, Argument(help="A states folder.")],
    sample: Annotated[str | None, Option(help="Share of the samples to hash, e.g. 1% or 0.01.")] = None,
    every: Annotated[bool, Option("--all", help="Hash every sample (the default).")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Check every line, header and size, and the hashes of the samples; name what is damaged."""
    from changeover.machine.progress import Progress
    from changeover.states.verify import verify as run_verify

    if sample is not None and every:
        raise InvalidInput(expected="--sample or --all", seen="both", todo="Give one of them.")
    share = 1.0 if sample is None else _share(sample)
    with ProgressLine("verify") as show:
        found = run_verify(
            folder,
            share=share,
            on_record=lambda done, total: show(Progress("verify", done, total, "samples")),
        )
    if as_json:
        print_json(found.to_json())
    else:
        _print_verification(folder, found)
    if found.damages:
        raise typer.Exit(ChangeoverError.exit_code)


@app.command()
def inspect(
    folder: Annotated[Path, Argument(help="A states folder.")],
    as_json: Annotated[bool, Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Say what is in a folder: samples, tokens, layers, where they come from, whether it is sealed."""
    from changeover.states.reader import StatesReader

    summary = summarise(StatesReader(folder))
    if as_json:
        print_json(summary)
        return
    width = max(len(name) for name in summary)
    for name, value in summary.items():
        typer.echo(f"{name.replace('_', ' '):<{width}}  {_shown(name, value)}")


def summarise(reader: StatesReader) -> dict[str, Any]:
    """The figures of a folder, from its manifest and index alone."""
    manifest = reader.manifest
    entries = [reader.entry(i) for i in range(len(reader))]
    tokens = sorted(entry.tokens for entry in entries)
    return {
        "folder": str(reader.root),
        "sealed": manifest.sealed,
        "samples": len(entries),
        "tokens": sum(tokens),
        "prompt_tokens": sum(entry.prompt_tokens for entry in entries),
        "supervised_tokens": sum(entry.supervised_tokens for entry in entries),
        "tokens_per_sample": {"min": tokens[0], "median": tokens[len(tokens) // 2], "max": tokens[-1]}
        if tokens
        else None,
        "bytes": sum(entry.bytes for entry in entries),
        "shards": len({entry.shard for entry in entries}),
        "boundaries": list(manifest.boundaries),
        "layers": manifest.layers,
        "hidden": manifest.hidden,
        "vocab": manifest.vocab,
        "dtype": manifest.dtype,
        "last_norm": manifest.last_norm,
        "codec": manifest.codec,
        "held_out_fraction": manifest.held_out_fraction,
        "model": {"name": manifest.model_name, "path": manifest.model_path, "sha256": manifest.model_sha256},
        "engine": {"kind": manifest.engine_kind, "version": manifest.engine_version},
        "created": manifest.created,
        "probe": dict(manifest.probe),
        "gate": dict(manifest.gate),
    }


def _print_verification(folder: Path, found: Verification) -> None:
    for damage in found.damages:
        typer.echo(f"damaged: {damage}")
    looked = f"{found.hashed_samples} of {found.samples} samples hashed ({_size(found.hashed_bytes)})"
    state = "sealed" if found.sealed else "not sealed"
    verdict = f"{len(found.damages)} damages" if found.damages else "whole"
    typer.echo(f"{folder}: {verdict}; {looked}; {state}")


def numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInput(
            expected="numbers such as 2,15,27", seen=text, todo="Correct --boundaries."
        ) from None


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise InvalidInput(expected="a share such as 1% or 0.01", seen=text, todo="Correct --sample.")
    return share


def _shown(name: str, value: object) -> str:
    if name == "bytes" and isinstance(value, int):
        return f"{_size(value)} ({value:,})"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(key, inner)}" for key, inner in value.items() if inner != []) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _size(count: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count} bytes"
