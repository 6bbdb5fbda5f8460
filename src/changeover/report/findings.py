"""Training read from the result of a ``train`` job, and the single facts of any result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from changeover.report.reading import interval, mapping, number, sequence, text, whole
from changeover.report.records import spell
from changeover.report.view import JobView
from changeover.report.words import count, size

Points = tuple[tuple[float, float], ...]
# Long lists and texts belong to the files they come from; the page shows where those are.
_LONGEST_FACT = 400
# Keys of a training's result that have a picture or a place of their own on the page.
_SHOWN_ELSEWHERE = ("params", "evaluation", "loss_curve", "held_out_curve", "acceptance_length")


@dataclass(frozen=True)
class Training:
    """A training job; curves are (step, value). ``step_rates``: share accepted at each draft step, if reached."""

    loss: Points
    held_out: Points
    curve_source: str
    acceptance_length: float | None
    acceptance_interval: tuple[float, float] | None
    step_rates: tuple[float | None, ...]
    draft_tokens: int | None
    facts: tuple[tuple[str, str], ...]


def read_training(job: JobView) -> Training:
    """From the job's result; while there is none, the curves are taken from its progress lines."""
    result = mapping(job.result)
    if result:
        loss, held_out = points(result.get("loss_curve")), points(result.get("held_out_curve"))
    else:
        loss, held_out = _from_progress(job, "loss"), _changes(_from_progress(job, "acceptance_length"))
    evaluation = mapping(result.get("evaluation"))
    return Training(
        loss=loss,
        held_out=held_out,
        curve_source="the job's result" if result else "the job's progress lines",
        acceptance_length=number(evaluation.get("acceptance_length")),
        acceptance_interval=interval(evaluation.get("ci95")),
        step_rates=tuple(number(rate) for rate in sequence(evaluation.get("step_acceptance"))),
        draft_tokens=whole(evaluation.get("draft_tokens")),
        facts=facts({key: value for key, value in result.items() if key not in _SHOWN_ELSEWHERE}),
    )


def _from_progress(job: JobView, name: str) -> Points:
    """One figure of the progress lines over their ``done`` (steps)."""
    found = ((point.done, number(point.detail.get(name))) for point in job.progress)
    return tuple((step, value) for step, value in found if step is not None and value is not None)


def _changes(curve: Points) -> Points:
    """Only the points at which the value is a new one: it is repeated until the next evaluation."""
    return tuple(point for index, point in enumerate(curve) if index == 0 or curve[index - 1][1] != point[1])


def points(value: Any) -> Points:
    """A curve spelled as ``[[x, y], ...]``; what is not a pair of numbers is dropped."""
    pairs = (sequence(item) for item in sequence(value))
    numbers = ((number(pair[0]), number(pair[1])) for pair in pairs if len(pair) == 2)
    return tuple((x, y) for x, y in numbers if x is not None and y is not None)


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
    if isinstance(value, list) and value and all(number(item) is not None for item in value):
        value = [item if isinstance(item, int) else float(f"{item:.4g}") for item in value]
    said = spell(value)
    return said if said is not None and len(said) <= _LONGEST_FACT else None


def words_of(key: Any) -> str:
    return (text(key) or "unnamed").replace("_", " ")
