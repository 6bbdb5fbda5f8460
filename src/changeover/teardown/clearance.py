"""The clearance: the verdict of a changeover, with everything that it stands on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from changeover.machine.errors import InvalidInput


class Verdict(StrEnum):
    """The end of a changeover, or of one item of it."""

    CLEAN = "clean"
    DIRTY = "dirty"
    FOREIGN_HOLDER = "foreign_holder"
    UNKILLABLE = "unkillable"
    UNVERIFIED = "unverified"


EXIT_CODES: Mapping[Verdict, int] = {
    Verdict.CLEAN: 0,
    Verdict.UNKILLABLE: 3,
    Verdict.DIRTY: 4,
    Verdict.FOREIGN_HOLDER: 5,
    Verdict.UNVERIFIED: 6,
}

# What is known to be bad goes before what is not known; what is ours goes before what is somebody else's.
_WORST_FIRST = (
    Verdict.UNKILLABLE,
    Verdict.DIRTY,
    Verdict.FOREIGN_HOLDER,
    Verdict.UNVERIFIED,
    Verdict.CLEAN,
)


@dataclass(frozen=True)
class Evidence:
    """One thing that was looked at. ``item`` names it: ``processes``, ``port:8000``, ``gpu:<uuid>`` ..."""

    item: str
    verdict: Verdict
    expected: str
    seen: str
    note: str = ""


@dataclass(frozen=True)
class StageRecord:
    """One stage as it went. ``outcome``: proved (ended by proof), expired (by its deadline), skipped."""

    stage: str
    seconds: float
    outcome: str
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SignalRecord:
    """A signal that is about to be sent, and why the process is ours."""

    pid: int
    start_ticks: int
    comm: str
    signal: str
    proof: str
    target: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Refusal:
    """A process that was looked at as a possible target and left alone."""

    pid: int
    start_ticks: int
    comm: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Clearance:
    """What a changeover ended with; the next phase names the one that it stands on."""

    verdict: Verdict
    evidence: tuple[Evidence, ...]
    stages: tuple[StageRecord, ...]
    signals: tuple[SignalRecord, ...]
    refusals: tuple[Refusal, ...]
    seconds: float
    lost_requests: int | None = None

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def clean(self) -> bool:
        return self.verdict is Verdict.CLEAN

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict.value,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 3),
            "lost_requests": self.lost_requests,
            "evidence": [{**asdict(one), "verdict": one.verdict.value} for one in self.evidence],
            "stages": [stage.to_json() for stage in self.stages],
            "signals": [one.to_json() for one in self.signals],
            "refusals": [refusal.to_json() for refusal in self.refusals],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Clearance:
        """Raises InvalidInput where it is not what ``to_json`` writes."""
        try:
            return cls(
                verdict=Verdict(value["verdict"]),
                evidence=tuple(
                    Evidence(**{**one, "verdict": Verdict(one["verdict"])}) for one in value["evidence"]
                ),
                stages=tuple(StageRecord(**stage) for stage in value["stages"]),
                signals=tuple(SignalRecord(**one) for one in value["signals"]),
                refusals=tuple(Refusal(**refusal) for refusal in value["refusals"]),
                seconds=value["seconds"],
                lost_requests=value["lost_requests"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput(
                expected="a clearance as Changeover writes it",
                seen=f"{str(value)[:200]} ({type(error).__name__}: {error})",
                todo="The record is damaged or from another version; `changeover check` shows the state now.",
            ) from error

    def to_text(self) -> str:
        """For people: the verdict, then every item, the worst first."""
        lines = [f"{self.verdict.value} (exit {self.exit_code}) after {self.seconds:.2f} s"]
        for one in sorted(self.evidence, key=lambda item: _WORST_FIRST.index(item.verdict)):
            lines.append(f"  {one.verdict.value:<14} {one.item}: {one.seen}" + _in_brackets(one.note))
            if one.verdict is not Verdict.CLEAN:
                lines.append(f"  {'':<14} expected {one.expected}")
        for stage in self.stages:
            lines.append(
                f"  {stage.seconds:8.2f} s   {stage.stage} {stage.outcome}" + _in_brackets(stage.detail)
            )
        for sent in self.signals:
            lines.append(f"  {sent.signal} to pid {sent.pid} ({sent.comm}): {sent.proof}")
        for refusal in self.refusals:
            lines.append(f"  left alone: pid {refusal.pid} ({refusal.comm}): {refusal.reason}")
        if self.lost_requests:
            lines.append(f"  requests lost: {self.lost_requests}")
        return "\n".join(lines)


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of a whole out of those of its items; nothing looked at is nothing verified."""
    seen = set(verdicts)
    return next((verdict for verdict in _WORST_FIRST if verdict in seen), Verdict.UNVERIFIED)


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""
