"""``changeover states probe`` and ``convert``: what stored states are, and the same states for other trainers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from changeover.cli.output import print_json, say
from changeover.cli.progress import ProgressLine
from changeover.machine.errors import ChangeoverError, InvalidInput

if TYPE_CHECKING:
    from changeover.states.formats.peer import PeerFormat
    from changeover.states.readings import Readings


class Format(StrEnum):
    """Whose files."""

    SPECFORGE = "specforge"
    SPECFORGE_GZ = "specforge-gz"
    ANGELSLIM = "angelslim"
    MODEL_OPTIMIZER = "model-optimizer"
    SPECULATORS = "speculators"


class Norm(StrEnum):
    POST = "post"
    PRE = "pre"


def probe(
    folder: Annotated[Path, Argument(help="A states folder.")],
    model: Annotated[str, Option(help="The target: its folder, or a built-in name.")],
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Tell from the states themselves whether they are what the manifest says: rows, final norm, model."""
    from changeover.engines.models import default_models_dir, resolve_model
    from changeover.states.reader import StatesReader
    from changeover.states.readings import compare_readings

    path = Path(resolve_model(model, default_models_dir()).path)
    found = compare_readings(StatesReader(folder), path)
    if as_json:
        print_json(found.to_json())
    else:
        _print_readings(found)
    if not found.as_said:
        raise typer.Exit(ChangeoverError.exit_code)


def convert(
    source: Annotated[Path, Argument(help="A states folder, or another trainer's.")],
    out: Annotated[Path, Argument(help="The folder to write; one that was begun is gone on with.")],
    to: Annotated[
        Format | None, Option("--to", help="Write this trainer's files from a states folder.")
    ] = None,
    from_: Annotated[
        Format | None, Option("--from", help="Read this trainer's files into a states folder.")
    ] = None,
    with_held_out: Annotated[
        bool, Option("--with-held-out", help="--to: the samples that are kept from training, too.")
    ] = False,
    model: Annotated[
        str | None, Option(help="--from, and --to speculators: the target, its folder or a built-in name.")
    ] = None,
    boundaries: Annotated[
        str | None, Option(help="--from: what was captured. Default: 2, L // 2, L - 3.")
    ] = None,
    last_norm: Annotated[
        Norm | None,
        Option(help="--from model-optimizer: where `hidden_states` was taken, before or after the norm."),
    ] = None,
    held_out: Annotated[float, Option(help="--from: share of the samples kept from training.")] = 0.1,
    trim: Annotated[
        bool, Option("--trim", help="--from: drop the rows behind the last answer (padding).")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """States for SpecForge, speculators, AngelSlim and NVIDIA Model-Optimizer, and theirs for Changeover."""
    if (to is None) == (from_ is None):
        raise InvalidInput(
            expected="--to or --from",
            seen="both" if to else "neither",
            todo="Say which way, and whose files.",
        )
    if to is not None:
        _export(source, out, to, with_held_out, model, as_json)
        return
    assert from_ is not None
    if model is None:
        raise InvalidInput(
            expected="--model with --from: the states are checked with its output layer",
            seen="none",
            todo="Give the target's folder.",
        )
    _take_in(source, out, from_, model, boundaries, last_norm, held_out, trim, as_json)


def _export(
    source: Path, out: Path, to: Format, with_held_out: bool, model: str | None, as_json: bool
) -> None:
    from changeover.engines.models import default_models_dir, resolve_model
    from changeover.states.final_norm import read_final_norm
    from changeover.states.formats.export import export
    from changeover.states.reader import StatesReader

    path = None if model is None else Path(resolve_model(model, default_models_dir()).path)
    with ProgressLine("convert") as show:
        done = export(
            StatesReader(source),
            form_of(to),
            out,
            with_held_out=with_held_out,
            final_norm=None if path is None else read_final_norm(path),
            on_progress=show,
        )
    if as_json:
        print_json(done.to_json())
        return
    left = f"; {done.left_out} held out from training were left out" if done.left_out else ""
    typer.echo(f"{done.samples} samples, {done.bytes:,} bytes in {done.folder}{left}")


def _take_in(
    source: Path,
    out: Path,
    whose: Format,
    model: str,
    boundaries: str | None,
    last_norm: Norm | None,
    held_out: float,
    trim: bool,
    as_json: bool,
) -> None:
    from changeover.cli.states import numbers
    from changeover.engines.models import default_models_dir, resolve_model
    from changeover.states.conventions import check_boundaries, default_boundaries
    from changeover.states.formats.take_in import take_in
    from changeover.states.manifest import Manifest

    facts = resolve_model(model, default_models_dir())
    asked = default_boundaries(facts.layers) if boundaries is None else numbers(boundaries)
    manifest = Manifest(
        hidden=facts.hidden,
        layers=facts.layers,
        vocab=facts.vocab,
        boundaries=check_boundaries(asked, facts.layers),
        model_name=model,
        model_path=facts.path,
        model_sha256=facts.sha256,
        engine_kind=f"files of {whose}",
        held_out_fraction=held_out,
    )
    with ProgressLine("convert") as show:
        done = take_in(
            source,
            form_of(whose),
            manifest,
            out,
            Path(facts.path),
            last_norm=None if last_norm is None else last_norm.value,
            trim=trim,
            on_progress=show,
        )
    if as_json:
        print_json(done.to_json())
    else:
        typer.echo(f"{done.samples} samples, {done.tokens:,} tokens in {done.folder}")
        _print_readings(done.readings)
        for name, reason in list(done.failed.items())[:20]:
            say(f"not read: {name}: {reason}")
        typer.echo("sealed" if done.sealed else f"not sealed: {'; '.join(done.objections)}")
    if not done.sealed:
        raise typer.Exit(ChangeoverError.exit_code)


def form_of(whose: Format) -> PeerFormat:
    """The code for these files."""
    from changeover.states.formats.angelslim import AngelSlim
    from changeover.states.formats.model_optimizer import ModelOptimizer
    from changeover.states.formats.specforge import SpecForge
    from changeover.states.formats.speculators import Speculators

    made: dict[Format, Any] = {
        Format.SPECFORGE: SpecForge(),
        Format.SPECFORGE_GZ: SpecForge(compressed=True),
        Format.ANGELSLIM: AngelSlim(),
        Format.MODEL_OPTIMIZER: ModelOptimizer(),
        Format.SPECULATORS: Speculators(),
    }
    form: PeerFormat = made[whose]
    return form


def _print_readings(found: Readings) -> None:
    typer.echo(
        f"the next token is the best of {found.rows:,} rows ({found.samples} samples), with the states read"
    )
    for name, share in sorted(found.shares.items(), key=lambda item: -item[1]):
        typer.echo(f"  {share:7.2%}  {name}")
    verdict = (
        "they are what the manifest says" if found.as_said else f"NOT as said: they look like {found.best}"
    )
    typer.echo(verdict)
