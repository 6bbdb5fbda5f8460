"""What a training run is asked to do: plain data, importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from changeover.machine.errors import InvalidInput


@dataclass(frozen=True)
class TrainParams:
    """Defaults are the ones measured best for the laptop example (see
    benchmarks/results/drafter_training_cpu.json).

    ``batch_tokens`` stored rows make one optimizer step. ``device`` is ``cpu``, ``cuda`` or ``auto``.
    ``threads`` 0 leaves torch's own choice. ``eval_draft_tokens`` is the draft length at which acceptance is
    simulated on the held-out samples, ``evaluations`` times over the run. ``resume`` continues from the
    newest checkpoint in ``out``, if any.
    """

    states: Path
    model: Path
    out: Path
    epochs: int = 3
    learning_rate: float = 2e-4
    batch_tokens: int = 512
    ttt_steps: int = 3
    draft_vocab_size: int = 4096
    eval_draft_tokens: int = 3
    seed: int = 0
    device: str = "auto"
    threads: int = 0
    checkpoint_every_s: float = 60.0
    evaluations: int = 6
    resume: bool = True

    def __post_init__(self) -> None:
        for name in (
            "epochs",
            "learning_rate",
            "batch_tokens",
            "ttt_steps",
            "draft_vocab_size",
            "eval_draft_tokens",
        ):
            if getattr(self, name) <= 0:
                raise InvalidInput(
                    expected=f"{name} above 0", seen=str(getattr(self, name)), todo=f"Set {name}."
                )
        if self.device not in ("auto", "cpu", "cuda"):
            raise InvalidInput(expected="device auto, cpu or cuda", seen=self.device, todo="Set device.")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrainParams:
        """From a job's JSON. Raises InvalidInput for unknown or missing names."""
        known = {field.name for field in fields(cls)}
        unknown, missing = sorted(data.keys() - known), sorted({"states", "model", "out"} - data.keys())
        if unknown or missing:
            raise InvalidInput(
                expected=f"training parameters out of {', '.join(sorted(known))}, with states, model and out",
                seen=f"unknown: {', '.join(unknown) or 'none'}; missing: {', '.join(missing) or 'none'}",
                todo="Correct the names.",
            )
        return cls(**{**data, **{name: Path(data[name]) for name in ("states", "model", "out")}})
