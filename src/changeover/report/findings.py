"""Training read from the result of a ``train`` job, and the single facts of any result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from changeover.report.reading import first, interval, mapping, number, sequence, text, whole
from changeover.report.records import spell
from changeover.report.view import JobView
from changeover.report.words import count, size

Points = tuple[tuple[float, float], ...]
# Long lists and texts belong to the files they come from; the page shows where those are.
_LONGEST_FACT = 400


@dataclass(frozen=True)
class Training:
    """A training job; curves are (step, value). ``step_rates``: share accepted at each draft step."""

    loss: Points
    loss_source: str
    held_out: Points
    acceptance_length: float | None
    acceptance_interval: tuple[float, float] | None
    step_rates: tuple[float, ...]
    draft_tokens: int | None
    facts: tuple[tuple[str, str], ...]


def read_training(job: JobView) -> Training:
    """From the job's result; while there is none, the loss curve is taken from its progress lines."""
    result = mapping(job.result)
    loss = points(first(result, "loss_curve", "curves.loss", "loss"), ("step", "x"), ("loss", "value", "y"))
    source = "the job's result"
    if not loss:
        loss, source = _loss_from_progress(job), "the job's progress lines"
    held = first(result, "held_out_curve", "heldout_curve", "curves.held_out", "eval_curve", "held_out")
    length = ("acceptance_length", "length", "simulated_acceptance_length", "value", "y")
    final = mapping(first(result, "evaluation", "held_out_final", "final", "held_out"))
    curve = points(held, ("step", "x"), length)
    simulated = number(first(result, "acceptance_length", "simulated_acceptance_length"))
    if simulated is None:
        simulated = number(first(final, *length))
    if simulated is None and curve:
        simulated = curve[-1][1]
    rates = first(result, "step_acceptance", "step_rates", "conditional_acceptance")
    rates = rates or first(final, "step_acceptance", "step_rates", "conditional_acceptance", "per_step")
    return Training(
        loss=loss,
        loss_source=source,
        held_out=curve,
        acceptance_length=simulated,
        acceptance_interval=interval(
            first(result, "acceptance_interval")
            or first(final, "interval", "ci", "ci95", "acceptance_interval")
        ),
        step_rates=tuple(rate for item in sequence(rates) if (rate := _rate(item)) is not None),
        draft_tokens=whole(first(result, "draft_tokens") or first(final, "draft_tokens")),
        facts=facts(result),
    )


def _rate(item: Any) -> float | None:
    return number(first(item, "rate", "value")) if isinstance(item, Mapping) else number(item)


def _loss_from_progress(job: JobView) -> Points:
    found = []
    for point in job.progress:
        loss, step = number(point.detail.get("loss")), number(point.detail.get("step"))
        step = point.done if step is None else step
        if loss is not None and step is not None:
            found.append((step, loss))
    return tuple(found)


def points(value: Any, x_keys: Sequence[str], y_keys: Sequence[str]) -> Points:
    """A curve spelled as ``[[x, y], ...]`` or as mappings with one of the given keys; others are dropped."""
    found = []
    for item in sequence(value):
        if isinstance(item, Mapping):
            x, y = number(first(item, *x_keys)), number(first(item, *y_keys))
        else:
            pair = sequence(item)
            x, y = (number(pair[0]), number(pair[1])) if len(pair) == 2 else (None, None)
        if x is not None and y is not None:
            found.append((x, y))
    return tuple(found)


def facts(result: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What a result says in single values, one level of nesting spelled ``outer: inner``; no long lists."""
    found: list[tuple[str, str | None]] = []
    for key, value in result.items():
        if isinstance(value, Mapping):
            found.extend(
                (f"{words_of(key)}: {words_of(name)}", _short(name, item)) for name, item in value.items()
            )
        else:
            found.append((words_of(key), _short(key, value)))
    return tuple((name, said) for name, said in found if said is not None)


def _short(key: Any, value: Any) -> str | None:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "bytes" and number(value) is not None:
        return f"{count(value)} ({size(value)})"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return count(value)
    said = spell(value)
    return said if said is not None and len(said) <= _LONGEST_FACT else None


def words_of(key: Any) -> str:
    return (text(key) or "unnamed").replace("_", " ")
