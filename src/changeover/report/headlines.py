"""The figures of a training and of a collection that people ask for first, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from changeover.report import words
from changeover.report.reading import dig, mapping, number, sequence
from changeover.report.records import spell
from changeover.report.view import JobView

Facts = list[tuple[str, str]]
_NOT_RECORDED = "not recorded"


def training_headline(job: JobView) -> Facts:
    """What a training cost and covered, in the order in which people ask."""
    result = mapping(job.result)
    if not result:
        return []
    steps, epochs = (words.count(number(result.get(key))) for key in ("steps", "epochs"))
    seconds, cpu_s = (words.seconds(number(result.get(key))) for key in ("seconds", "cpu_seconds"))
    train, held_out = (words.count(number(result.get(f"{key}_samples"))) for key in ("train", "held_out"))
    size = words.count(number(dig(result, "vocabulary", "size")))
    covered = words.percent(number(dig(result, "vocabulary", "coverage_held_out")))
    return [
        ("steps", f"{steps} in {epochs} epochs"),
        ("time", f"{seconds} ({cpu_s} of processor time)"),
        (
            "tokens",
            f"{words.count(number(result.get('tokens')))}, {words.figure(number(result.get('tokens_per_s')))} a second",
        ),
        ("samples", f"{train} trained on, {held_out} held out"),
        ("trained parameters", words.count(number(result.get("trained_parameters")))),
        ("draft vocabulary", f"{size} tokens, {covered} of the held-out tokens"),
    ]


def states_headline(job: JobView) -> Facts:
    """How many states there are and what vouches for them."""
    result = mapping(job.result)
    if not result:
        return []
    counts = {key: words.count(number(result.get(key))) for key in ("samples", "failed", "held_out")}
    tokens, supervised = (words.count(number(result.get(key))) for key in ("tokens", "supervised_tokens"))
    return [
        ("samples", "{samples} stored, {failed} failed, {held_out} held out from training".format(**counts)),
        ("tokens", f"{tokens}, {supervised} of them generated"),
        ("size", words.size(number(result.get("bytes")))),
        ("boundaries", f"{_said(result, 'boundaries')}; last: {_said(result, 'last_norm')}-norm"),
        ("probe", _probe(mapping(result.get("probe")))),
        ("gate", _gate(mapping(result.get("gate")))),
    ]


def _said(result: Mapping[str, Any], key: str) -> str:
    return spell(result.get(key)) or _NOT_RECORDED


def failures(job: JobView) -> list[str]:
    """Samples that could not be had, each with its reason."""
    said = sequence(mapping(job.result).get("failures"))
    return [spell(failure) or words.ABSENT for failure in said]


def _probe(said: Mapping[str, Any]) -> str:
    """Whether the stored states give the tokens that the engine generated."""
    if "passed" not in said:
        return _NOT_RECORDED
    agreed, rows = words.count(number(said.get("agreed"))), words.count(number(said.get("rows")))
    share = words.percent(number(said.get("agreement")))
    verdict = "passed" if said["passed"] is True else "FAILED"
    exact = f"; without near ties {words.count(number(said.get('exact')))}" if "exact" in said else ""
    return f"{verdict}: {agreed} of {rows} rows give the token generated ({share}){exact}"


def _gate(said: Mapping[str, Any]) -> str:
    if not said:
        return _NOT_RECORDED
    samples, requested, failed = (
        words.count(number(said.get(key))) for key in ("samples", "requested", "failed")
    )
    return f"{samples} of {requested} samples there, {failed} failed with a reason"
