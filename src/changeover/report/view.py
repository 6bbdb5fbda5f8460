"""The run as facts for a page: frozen dataclasses, in the words of docs/design.md.

Everything is in seconds since the run's first event (``*_s``), MiB (``*_mib``) or the journal's own units.
``None`` always means "the journal does not say".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class JournalEvent(Protocol):
    """One line of a journal, as ``changeover.pipeline.journal`` reads it."""

    @property
    def seq(self) -> int: ...
    @property
    def t_wall(self) -> float: ...
    @property
    def t_mono(self) -> float: ...
    @property
    def event(self) -> str: ...
    @property
    def data(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Span:
    """A stretch of the run; ``end_s`` is None when the journal has no end for it."""

    start_s: float
    end_s: float | None

    @property
    def seconds(self) -> float | None:
        return None if self.end_s is None else max(0.0, self.end_s - self.start_s)


@dataclass(frozen=True)
class Session:
    """One life of the runner: from ``run.started`` or ``run.resumed`` to the last event it wrote."""

    span: Span
    started_wall: float
    pid: int | None
    boot_id: str | None
    after_seq: int | None


@dataclass(frozen=True)
class ProgressPoint:
    t_s: float
    stage: str | None
    done: float | None
    total: float | None
    unit: str | None
    detail: Mapping[str, Any]


@dataclass(frozen=True)
class ServerView:
    """One server of one phase. ``ready_seconds`` is the runner's own measurement of the loading."""

    engine: str | None
    profile: str | None
    argv: tuple[str, ...]
    env: Mapping[str, Any]
    ports: tuple[Any, ...]
    pid: int | None
    url: str | None
    log: str | None
    starting_s: float
    ready_s: float | None
    ready_seconds: float | None
    stopped_s: float | None
    loading: tuple[ProgressPoint, ...]


@dataclass(frozen=True)
class JobView:
    """One job. ``state`` is done, failed or unfinished (no end in the journal)."""

    phase: str
    name: str
    kind: str | None
    state: str
    span: Span
    seconds: float | None
    params: Mapping[str, Any]
    result: Mapping[str, Any] | None
    reason: str | None
    log_tail: str | None
    progress: tuple[ProgressPoint, ...]


@dataclass(frozen=True)
class Member:
    """A process that was seen below a server or a job (``process``); numbers as the journal spells them."""

    process: str
    pid: str | None
    start_ticks: str | None
    comm: str | None


@dataclass(frozen=True)
class PhaseView:
    """One attempt at a phase; a resumed run may try a phase twice."""

    name: str
    index: int | None
    attempt: int
    state: str
    span: Span
    seconds: float | None
    reason: str | None
    outputs: Any
    digest: str | None
    servers: tuple[ServerView, ...]
    jobs: tuple[JobView, ...]
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Sample:
    """What the machine held at one instant of a changeover."""

    t_s: float
    processes: int | None
    rss_mib: float | None
    gpus: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Stage:
    name: str
    seconds: float | None
    outcome: str | None
    detail: str | None


@dataclass(frozen=True)
class Evidence:
    item: str
    verdict: str
    expected: str | None
    seen: str | None
    note: str | None


@dataclass(frozen=True)
class Signal:
    pid: int | None
    start_ticks: int | None
    signal: str | None
    proof: str | None
    comm: str | None


@dataclass(frozen=True)
class Refusal:
    """A process that was looked at and left alone."""

    pid: int | None
    comm: str | None
    reason: str


@dataclass(frozen=True)
class ClearanceView:
    verdict: str
    exit_code: int | None
    seconds: float | None
    evidence: tuple[Evidence, ...]
    refusals: tuple[Refusal, ...]
    lost_requests: int | None


@dataclass(frozen=True)
class ChangeoverView:
    """One passage between two phases; ``clearance`` is None when no verdict was recorded."""

    number: int
    after: str
    before: str | None
    span: Span
    seconds: float | None
    targets: tuple[Any, ...]
    stages: tuple[Stage, ...]
    signals: tuple[Signal, ...]
    samples: tuple[Sample, ...]
    clearance: ClearanceView | None

    @property
    def verdict(self) -> str:
        return self.clearance.verdict if self.clearance else "no verdict recorded"

    @property
    def is_clean(self) -> bool:
        return self.clearance is not None and self.clearance.verdict == "clean"


@dataclass(frozen=True)
class RunView:
    """A whole run. ``state`` is done, failed, interrupted or unfinished (no end in the journal).

    ``seconds`` is what the last life of the runner says of itself; ``span_s`` goes from the first event to
    the last.
    """

    name: str | None
    run_id: str | None
    state: str
    reason: str | None
    seconds: float | None
    exit_code: int | None
    started_wall: float | None
    host: Any
    argv: tuple[str, ...]
    versions: Mapping[str, Any]
    spec: Any
    model: Mapping[str, Any]
    sessions: tuple[Session, ...]
    phases: tuple[PhaseView, ...]
    changeovers: tuple[ChangeoverView, ...]
    span_s: float
    event_count: int
    last_event: str | None
    last_wall: float | None
    remarks: tuple[str, ...]

    @property
    def jobs(self) -> tuple[JobView, ...]:
        return tuple(job for phase in self.phases for job in phase.jobs)

    def jobs_of_kind(self, *kinds: str) -> tuple[JobView, ...]:
        return tuple(job for job in self.jobs if job.kind in kinds)

    def finished(self, *kinds: str) -> tuple[JobView, ...]:
        """Jobs of these kinds that left a result."""
        return tuple(job for job in self.jobs_of_kind(*kinds) if job.result is not None)


def phase_names(phases: Sequence[PhaseView]) -> list[str]:
    """The phases' names, in order, each once."""
    return list(dict.fromkeys(phase.name for phase in phases))
