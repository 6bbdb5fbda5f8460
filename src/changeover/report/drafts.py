"""The parts of a run while the fold is still adding to them; each gives its frozen view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from changeover.report.reading import mapping, mappings, sequence, text, whole
from changeover.report.records import read_clearance, read_signal, read_stage
from changeover.report.view import (
    ChangeoverView,
    JobView,
    Member,
    PhaseView,
    ProgressPoint,
    Sample,
    ServerView,
    Signal,
    Span,
    Stage,
)


@dataclass
class ServerDraft:
    starting_s: float
    facts: dict[str, Any] = field(default_factory=dict)
    ready_s: float | None = None
    ready_seconds: float | None = None
    stopped_s: float | None = None
    loading: list[ProgressPoint] = field(default_factory=list)

    def view(self) -> ServerView:
        facts = self.facts
        return ServerView(
            engine=text(facts.get("engine")),
            profile=text(facts.get("profile")),
            argv=tuple(str(word) for word in sequence(facts.get("argv"))),
            env=mapping(facts.get("env")),
            ports=tuple(sequence(facts.get("ports"))),
            pid=whole(facts.get("pid")),
            url=text(facts.get("url")),
            log=text(facts.get("log")),
            starting_s=self.starting_s,
            ready_s=self.ready_s,
            ready_seconds=self.ready_seconds,
            stopped_s=self.stopped_s,
            loading=tuple(self.loading),
        )


@dataclass
class JobDraft:
    phase: str
    name: str
    start_s: float
    kind: str | None = None
    state: str = "unfinished"
    end_s: float | None = None
    seconds: float | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None
    reason: str | None = None
    log_tail: str | None = None
    progress: list[ProgressPoint] = field(default_factory=list)
    announced: bool = False

    def view(self) -> JobView:
        span = Span(self.start_s, self.end_s)
        seconds = self.seconds if self.seconds is not None else span.seconds
        return JobView(
            self.phase,
            self.name,
            self.kind,
            self.state,
            span,
            seconds,
            self.params,
            self.result,
            self.reason,
            self.log_tail,
            tuple(self.progress),
        )


@dataclass
class PhaseDraft:
    name: str
    attempt: int
    start_s: float
    index: int | None = None
    state: str = "unfinished"
    end_s: float | None = None
    seconds: float | None = None
    reason: str | None = None
    outputs: Any = None
    digest: str | None = None
    servers: list[ServerDraft] = field(default_factory=list)
    members: dict[tuple[str, str | None, str | None], str | None] = field(default_factory=dict)
    jobs: list[JobDraft] = field(default_factory=list)

    def view(self) -> PhaseView:
        span = Span(self.start_s, self.end_s)
        return PhaseView(
            name=self.name,
            index=self.index,
            attempt=self.attempt,
            state=self.state,
            span=span,
            seconds=self.seconds if self.seconds is not None else span.seconds,
            reason=self.reason,
            outputs=self.outputs,
            digest=self.digest,
            servers=tuple(server.view() for server in self.servers),
            jobs=tuple(job.view() for job in self.jobs),
            members=tuple(Member(*key, comm) for key, comm in self.members.items()),
        )


@dataclass
class ChangeoverDraft:
    after: str
    start_s: float
    targets: tuple[Any, ...] = ()
    end_s: float | None = None
    stages: list[Stage] = field(default_factory=list)
    signals: list[Signal] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    cleared: Mapping[str, Any] | None = None
    announced: bool = False

    def view(self, number_: int, before: str | None) -> ChangeoverView:
        clearance = read_clearance(self.cleared) if self.cleared is not None else None
        span = Span(self.start_s, self.end_s)
        seconds = clearance.seconds if clearance and clearance.seconds is not None else span.seconds
        said = mapping(self.cleared)
        return ChangeoverView(
            number=number_,
            after=self.after,
            before=before,
            span=span,
            seconds=seconds,
            targets=self.targets,
            stages=tuple(self.stages) or tuple(read_stage(item) for item in mappings(said.get("stages"))),
            signals=tuple(self.signals) or tuple(read_signal(item) for item in mappings(said.get("signals"))),
            samples=tuple(self.samples),
            clearance=clearance,
        )
