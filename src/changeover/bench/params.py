"""What a benchmark is asked to do, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from changeover.bench.load import ROUTES, Api
from changeover.machine.errors import InvalidInput


@dataclass(frozen=True)
class BenchParams:
    """What to measure.

    ``model`` None asks the server; ``requests`` None sends every prompt that is left after the warm-up's, once;
    ``held_out`` uses only the prompts that a collection with the same share
    keeps from training; ``out`` is the folder for requests.jsonl (None: not written); ``timeout_s`` is per
    request.
    """

    url: str
    prompts: Path
    model: str | None = None
    concurrency: tuple[int, ...] = (1, 4)
    requests: int | None = 16
    max_tokens: int = 64
    repeats: int = 3
    warmup: int = 2
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    api: Api = "chat"
    held_out: float | None = None
    out: Path | None = None
    timeout_s: float = 600.0

    @classmethod
    def from_json(cls, params: Mapping[str, Any]) -> BenchParams:
        """From a job's parameters (paths as strings, tuples as lists).

        Raises:
            InvalidInput: a name that is not a parameter, or ``url`` or ``prompts`` missing.
        """
        known = {field.name for field in fields(cls)}
        strange = sorted(set(params) - known)
        if strange or not {"url", "prompts"} <= set(params):
            raise InvalidInput(
                expected=f"url and prompts, and of the others only {', '.join(sorted(known))}",
                seen=", ".join(sorted(params)) or "nothing",
                todo="Correct the job's parameters.",
            )
        values = dict(params)
        values["prompts"] = Path(values["prompts"])
        values["concurrency"] = tuple(values.get("concurrency", cls.concurrency))
        if values.get("out") is not None:
            values["out"] = Path(values["out"])
        return cls(**values)

    def __post_init__(self) -> None:
        """Refuse what cannot be measured (InvalidInput)."""
        if not self.concurrency or len(set(self.concurrency)) != len(self.concurrency):
            raise InvalidInput(
                expected="levels of concurrency, each once", seen=str(self.concurrency), todo="E.g. 1,4,16."
            )
        least = {"requests": 1, "max_tokens": 1, "repeats": 1, "warmup": 0}
        counts = [("concurrency", level, 1) for level in self.concurrency]
        counts += [(name, getattr(self, name), low) for name, low in least.items()]
        for name, value, low in counts:
            if value is not None and value < low:
                raise InvalidInput(
                    expected=f"{name} of at least {low}", seen=str(value), todo=f"Give a larger --{name}."
                )
        if self.api not in ROUTES:
            raise InvalidInput(expected="api chat or completions", seen=self.api, todo="Give one of the two.")
