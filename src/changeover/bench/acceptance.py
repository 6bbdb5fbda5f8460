"""Speculative decoding as the server counts it: the difference of ``/metrics`` over one measured repeat.

A lifetime average would hold the warm-up and whatever ran before (sglang#34743), and one data-parallel rank
is not the server, so counters are summed over all label sets and subtracted. Gauges (SGLang's
``spec_accept_length``) cannot be subtracted and are not used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from changeover.engines.protocol import SpeculationMetrics
from changeover.engines.registry import get_engine

# Prefix of an engine's metric names -> its kind.
PREFIXES = {"changeover": "embedded", "vllm": "vllm", "sglang": "sglang"}
UNKNOWN_ENGINE = "openai"
NO_COUNTERS = SpeculationMetrics(None, None, None)

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(?P<value>\S+)")


@dataclass(frozen=True)
class Acceptance:
    """What was drafted and accepted in one repeat; ``drafts`` counts verify steps.

    ``length`` is tokens a verify step, 1 + accepted / drafts.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int

    @property
    def length(self) -> float:
        return 1.0 + self.accepted_tokens / self.drafts

    @property
    def rate(self) -> float | None:
        """Accepted share of the drafted tokens."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "length": self.length, "rate": self.rate}


def read_counters(text: str) -> dict[str, float]:
    """Every sample of a Prometheus text exposition, summed over its labels (data-parallel ranks, models)."""
    counters: dict[str, float] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        counters[found["name"]] = counters.get(found["name"], 0.0) + value
    return counters


def engine_of(counters: Mapping[str, float]) -> str:
    """Which engine publishes these metrics; ``openai`` when none that we know."""
    for prefix, engine in PREFIXES.items():
        if any(name.startswith(f"{prefix}:") for name in counters):
            return engine
    return UNKNOWN_ENGINE


def speculation_names(engine: str) -> SpeculationMetrics:
    """Under which names an engine, as :func:`engine_of` calls it, counts speculation."""
    return NO_COUNTERS if engine == UNKNOWN_ENGINE else get_engine(engine).speculation


def acceptance_between(
    before: Mapping[str, float], after: Mapping[str, float], names: SpeculationMetrics
) -> tuple[Acceptance | None, str | None]:
    """The acceptance between two readings, or None with the reason why there is none."""
    if names.drafts is None or names.draft_tokens is None or names.accepted_tokens is None:
        gauge = names.acceptance_length
        return None, f"no counters of drafts; only the gauge {gauge}" if gauge else "no counters of drafts"
    if names.drafts not in after:
        return None, f"the server publishes no {names.drafts}"
    deltas = []
    for name in (names.drafts, names.draft_tokens, names.accepted_tokens):
        first, last = before.get(name, 0.0), after.get(name, math.nan)
        if not math.isfinite(last - first):
            return None, f"{name} was {first}, then {last}: not a count"
        if last < first:
            return None, f"{name} went backwards, from {first:.0f} to {last:.0f}: the server was reset"
        deltas.append(round(last - first))
    if deltas[0] == 0:
        return None, "the server made no draft in this repeat"
    return Acceptance(*deltas), None


def generated_between(before: Mapping[str, float], after: Mapping[str, float]) -> int | None:
    """Tokens that the server says it generated between two readings, for anybody; None if it does not say."""
    for prefix in PREFIXES:
        name = f"{prefix}:generation_tokens_total"
        first, last = before.get(name), after.get(name)
        if first is not None and last is not None and math.isfinite(last - first) and last >= first:
            return round(last - first)
    return None
