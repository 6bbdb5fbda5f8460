"""``changeover drafter``: train an EAGLE-3 drafter on states, judge it, write it for servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from changeover.cli.output import print_json
from changeover.cli.progress import ProgressLine

app = typer.Typer(help="Drafters: train, evaluate, export.", no_args_is_help=True)


@app.command()
def train(
    states: Annotated[Path, Option(help="The states folder that 'changeover states collect' wrote.")],
    model: Annotated[str, Option(help="The target: its folder, or a built-in name.")],
    out: Annotated[Path, Option(help="Checkpoints and the drafter go here; a started training is resumed.")],
    epochs: Annotated[int | None, Option(help="Passes over the training samples.")] = None,
    learning_rate: Annotated[float | None, Option(help="Peak learning rate of the draft layer.")] = None,
    batch_tokens: Annotated[int | None, Option(help="Tokens of one optimizer step.")] = None,
    ttt_steps: Annotated[int | None, Option(help="Length of training-time test.")] = None,
    draft_vocab_size: Annotated[int | None, Option(help="Tokens that the drafter may propose.")] = None,
    eval_draft_tokens: Annotated[int | None, Option(help="Draft length of simulated acceptance.")] = None,
    seed: Annotated[int | None, Option(help="Decides the order of samples and the first weights.")] = None,
    device: Annotated[str | None, Option(help="auto, cpu or cuda.")] = None,
    threads: Annotated[int | None, Option(help="CPU threads; default: torch's choice.")] = None,
    resume: Annotated[bool, Option(help="Continue from the newest checkpoint in OUT.")] = True,
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Train a drafter and export it to OUT/drafter."""
    from changeover.drafter.params import TrainParams
    from changeover.drafter.train import train as run_train

    given = {
        "epochs": epochs,
        "learning_rate": learning_rate,
        "batch_tokens": batch_tokens,
        "ttt_steps": ttt_steps,
        "draft_vocab_size": draft_vocab_size,
        "eval_draft_tokens": eval_draft_tokens,
        "seed": seed,
        "device": device,
        "threads": threads,
    }
    params = TrainParams.from_json(
        {
            "states": states,
            "model": _model_folder(model),
            "out": out,
            "resume": resume,
            **{name: value for name, value in given.items() if value is not None},
        }
    )
    with ProgressLine("train") as show:
        result = run_train(params, show)
    if as_json:
        print_json(result)
        return
    typer.echo(
        f"{result['steps']} steps, {result['tokens']:,} tokens in {result['seconds']:.0f} s "
        f"({result['tokens_per_s']:,.0f} tokens/s); drafter in {result['drafter']}"
    )
    if result["evaluation"] is not None:
        _say_evaluation(result["evaluation"])


@app.command()
def evaluate(
    states: Annotated[Path, Option(help="States of the same target; their held-out samples are replayed.")],
    model: Annotated[str, Option(help="The target: its folder, or a built-in name.")],
    drafter: Annotated[Path, Option(help="An exported drafter folder.")],
    draft_tokens: Annotated[
        int, Option(help="Tokens drafted a verify step, as the server will be told.")
    ] = 3,
    device: Annotated[str, Option(help="cpu or cuda.")] = "cpu",
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Simulate the acceptance length that a greedy server would reach on the held-out samples."""
    from changeover.drafter.evaluate import evaluate as run_evaluate

    with ProgressLine("evaluate") as show:
        result = run_evaluate(
            states=states,
            model=_model_folder(model),
            drafter=drafter,
            draft_tokens=draft_tokens,
            device=device,
            on_progress=show,
        )
    if as_json:
        print_json(result)
        return
    _say_evaluation(result)
    typer.echo(f"draft vocabulary covers {result['vocabulary_coverage']:.1%} of the answers' tokens")


@app.command()
def export(
    training: Annotated[Path, Option(help="The OUT folder of a training, finished or not.")],
    model: Annotated[str, Option(help="The target: its folder, or a built-in name.")],
    out: Annotated[Path, Option(help="The folder to write; SGLang, vLLM and the embedded server load it.")],
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Write the newest checkpoint of a training as a folder that servers load."""
    from changeover.drafter.export import export_checkpoint

    result = export_checkpoint(training, _model_folder(model), out)
    if as_json:
        print_json(result)
        return
    typer.echo(f"step {result['step']} of {training} in {result['drafter']}")


def _model_folder(name_or_path: str) -> Path:
    from changeover.engines.models import default_models_dir, resolve_model

    return Path(resolve_model(name_or_path, default_models_dir()).path)


def _say_evaluation(found: dict[str, Any]) -> None:
    interval = found["ci95"]
    between = "" if interval is None else f" (95 % interval {interval[0]:.3f} to {interval[1]:.3f})"
    typer.echo(
        f"acceptance length {found['acceptance_length']:.3f}{between} at {found['draft_tokens']} draft tokens, "
        f"{found['samples']} held-out samples"
    )
    rates = ["none" if rate is None else f"{rate:.1%}" for rate in found["step_acceptance"]]
    typer.echo(f"accepted at each draft step: {', '.join(rates)}")
