"""From journal events to the view: a fold over the events that accepts any prefix of any journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from changeover.report.drafts import ChangeoverDraft, JobDraft, PhaseDraft, ServerDraft
from changeover.report.reading import mapping, mappings, number, sequence, text, whole
from changeover.report.records import read_progress, read_signal, read_stage, spell
from changeover.report.timing import BEGINS_SESSION, place_in_time
from changeover.report.view import JournalEvent, RunView, Sample, Session, Span

_ENDS_RUN = {"run.done": "done", "run.failed": "failed", "run.interrupted": "interrupted"}


def build_view(events: Iterable[JournalEvent]) -> RunView:
    """Fold a journal into a :class:`RunView`. Never raises for what the events hold or lack."""
    fold = _Fold()
    for t_s, event in place_in_time(events):
        fold.take(t_s, event)
    return fold.view()


class _Fold:
    """The state of the fold: what has been said so far."""

    def __init__(self) -> None:
        self.run: dict[str, Any] = {}
        self.state = "unfinished"
        self.reason: str | None = None
        self.seconds: float | None = None
        self.exit_code: int | None = None
        self.sessions: list[dict[str, Any]] = []
        self.phases: list[PhaseDraft] = []
        self.changeovers: list[ChangeoverDraft] = []
        self.starts: list[tuple[float, str]] = []
        self.count = 0
        self.last_s = 0.0
        self.last: JournalEvent | None = None
        self.first_wall: float | None = None
        self.unknown: dict[str, int] = {}
        self.remarks: list[str] = []
        self._takers: dict[str, Callable[[float, Mapping[str, Any]], None]] = {
            "phase.started": self._phase_started,
            "phase.done": self._phase_done,
            "phase.failed": self._phase_failed,
            "baseline.taken": self._noted,
            "server.starting": self._server_starting,
            "server.started": self._server_started,
            "server.members": self._server_members,
            "server.loading": self._server_loading,
            "server.ready": self._server_ready,
            "job.starting": self._job_starting,
            "job.started": self._job_started,
            "job.progress": self._job_progress,
            "job.done": self._job_done,
            "job.failed": self._job_failed,
            **dict.fromkeys(("ahead.checked", "ahead.starting", "ahead.started", "ahead.done"), self._noted),
            "changeover.started": self._changeover_started,
            "changeover.stage": self._changeover_stage,
            "changeover.signal": self._changeover_signal,
            "changeover.delivered": self._noted,
            "changeover.sample": self._changeover_sample,
            "changeover.cleared": self._changeover_cleared,
        }

    def take(self, t_s: float, event: JournalEvent) -> None:
        data = mapping(event.data)
        if self.last is not None and event.seq != self.last.seq + 1:
            self.remarks.append(f"The journal jumps from event {self.last.seq} to {event.seq}.")
        self.count += 1
        self.last_s, self.last = t_s, event
        if self.first_wall is None:
            self.first_wall = number(event.t_wall)
            if event.event != "run.started":
                self.remarks.append(f"The journal begins with {event.event}, not with run.started.")
        if event.event in BEGINS_SESSION:
            self._session(t_s, event, data)
        elif event.event in _ENDS_RUN:
            self.state, self.reason = _ENDS_RUN[event.event], text(data.get("reason"))
            self.seconds = number(data.get("seconds"))
            self.exit_code = whole(data.get("exit_code"))
        elif event.event in self._takers:
            self._takers[event.event](t_s, data)
        else:
            self.unknown[event.event] = self.unknown.get(event.event, 0) + 1
        if self.sessions:
            self.sessions[-1]["end_s"] = t_s

    # run and phases

    def _session(self, t_s: float, event: JournalEvent, data: Mapping[str, Any]) -> None:
        if event.event == "run.started":
            self.run = dict(data)
        self.state, self.reason, self.seconds, self.exit_code = "unfinished", None, None, None
        wall = number(event.t_wall) or 0.0
        self.sessions.append({"start_s": t_s, "end_s": t_s, "wall": wall, "data": data})

    def _phase_started(self, t_s: float, data: Mapping[str, Any]) -> None:
        name = text(data.get("phase")) or "unnamed phase"
        attempt = 1 + sum(phase.name == name for phase in self.phases)
        self.phases.append(
            PhaseDraft(name, attempt, t_s, whole(data.get("index")), digest=text(data.get("digest")))
        )
        self.starts.append((t_s, name))

    def _phase(self, t_s: float, data: Mapping[str, Any]) -> PhaseDraft:
        name = text(data.get("phase")) or "unnamed phase"
        for phase in reversed(self.phases):
            if phase.name == name:
                return phase
        self.phases.append(PhaseDraft(name, 1, t_s))
        return self.phases[-1]

    def _phase_done(self, t_s: float, data: Mapping[str, Any]) -> None:
        phase = self._phase(t_s, data)
        phase.state, phase.end_s = "done", t_s
        phase.seconds = number(data.get("seconds"))
        phase.outputs = data.get("outputs")
        phase.digest = text(data.get("digest")) or phase.digest

    def _phase_failed(self, t_s: float, data: Mapping[str, Any]) -> None:
        phase = self._phase(t_s, data)
        phase.state, phase.end_s, phase.reason = "failed", t_s, text(data.get("reason"))

    def _noted(self, t_s: float, data: Mapping[str, Any]) -> None:
        """An event that the page needs nothing from."""

    # servers

    def _server(self, t_s: float, data: Mapping[str, Any]) -> ServerDraft:
        phase = self._phase(t_s, data)
        if not phase.servers:
            phase.servers.append(ServerDraft(t_s))
        return phase.servers[-1]

    def _server_starting(self, t_s: float, data: Mapping[str, Any]) -> None:
        self._phase(t_s, data).servers.append(ServerDraft(t_s, dict(data)))

    def _server_started(self, t_s: float, data: Mapping[str, Any]) -> None:
        self._server(t_s, data).facts.update(data)

    def _server_members(self, t_s: float, data: Mapping[str, Any]) -> None:
        """Members of the server, or of a job (``process`` names it)."""
        phase, process = self._phase(t_s, data), text(data.get("process")) or "server"
        for member in mappings(data.get("members")):
            phase.members[(process, spell(member.get("pid")), spell(member.get("start_ticks")))] = text(
                member.get("comm")
            )

    def _server_loading(self, t_s: float, data: Mapping[str, Any]) -> None:
        self._server(t_s, data).loading.append(read_progress(t_s, data))

    def _server_ready(self, t_s: float, data: Mapping[str, Any]) -> None:
        server = self._server(t_s, data)
        server.ready_s, server.ready_seconds = t_s, number(data.get("seconds"))

    # jobs

    def _job(self, t_s: float, data: Mapping[str, Any]) -> JobDraft:
        phase, name = self._phase(t_s, data), text(data.get("job")) or "unnamed job"
        for job in reversed(phase.jobs):
            if job.name == name:
                return job
        phase.jobs.append(JobDraft(phase.name, name, t_s, text(data.get("kind"))))
        return phase.jobs[-1]

    def _job_starting(self, t_s: float, data: Mapping[str, Any]) -> None:
        phase, name = self._phase(t_s, data), text(data.get("job")) or "unnamed job"
        kind, params = text(data.get("kind")), mapping(data.get("params"))
        phase.jobs.append(JobDraft(phase.name, name, t_s, kind, params=params, announced=True))

    def _job_started(self, t_s: float, data: Mapping[str, Any]) -> None:
        phase, name = self._phase(t_s, data), text(data.get("job")) or "unnamed job"
        last = phase.jobs[-1] if phase.jobs else None
        if last is None or last.name != name or not last.announced:
            phase.jobs.append(last := JobDraft(phase.name, name, t_s))
        last.announced = False
        last.kind = text(data.get("kind")) or last.kind
        last.params = mapping(data.get("params")) or last.params

    def _job_progress(self, t_s: float, data: Mapping[str, Any]) -> None:
        self._job(t_s, data).progress.append(read_progress(t_s, data))

    def _job_done(self, t_s: float, data: Mapping[str, Any]) -> None:
        job = self._job(t_s, data)
        job.state, job.end_s, job.seconds = "done", t_s, number(data.get("seconds"))
        job.kind = text(data.get("kind")) or job.kind
        job.result = data["result"] if isinstance(data.get("result"), Mapping) else None

    def _job_failed(self, t_s: float, data: Mapping[str, Any]) -> None:
        job = self._job(t_s, data)
        job.state, job.end_s, job.reason = "failed", t_s, text(data.get("reason"))
        job.kind = text(data.get("kind")) or job.kind
        tail = data.get("log_tail")
        job.log_tail = "\n".join(map(str, tail)) if isinstance(tail, list) else text(tail)

    # changeovers

    def _changeover(self, t_s: float, data: Mapping[str, Any]) -> ChangeoverDraft:
        if not self.changeovers or self.changeovers[-1].cleared is not None:
            self.changeovers.append(ChangeoverDraft(text(data.get("phase")) or "unnamed phase", t_s))
        return self.changeovers[-1]

    def _changeover_started(self, t_s: float, data: Mapping[str, Any]) -> None:
        name = text(data.get("phase")) or "unnamed phase"
        last = self.changeovers[-1] if self.changeovers else None
        if last is None or last.announced or last.after != name:
            # Senders are signalled before the changeover is announced; else it begins here.
            self.changeovers.append(last := ChangeoverDraft(name, t_s))
        last.announced, last.targets = True, tuple(sequence(data.get("targets")))
        for phase in self.phases:
            if phase.name == name:
                for server in phase.servers:
                    server.stopped_s = t_s if server.stopped_s is None else server.stopped_s

    def _changeover_stage(self, t_s: float, data: Mapping[str, Any]) -> None:
        self._changeover(t_s, data).stages.append(read_stage(data))

    def _changeover_signal(self, t_s: float, data: Mapping[str, Any]) -> None:
        self._changeover(t_s, data).signals.append(read_signal(data))

    def _changeover_sample(self, t_s: float, data: Mapping[str, Any]) -> None:
        at = number(data.get("t_s"))
        changeover = self._changeover(t_s, data)
        gpus = tuple(
            (text(gpu.get("uuid")) or "unnamed GPU", used)
            for gpu in mappings(data.get("gpus"))
            if (used := number(gpu.get("used_mib"))) is not None
        )
        changeover.samples.append(
            Sample(
                at if at is not None else t_s - changeover.start_s,
                whole(data.get("processes")),
                number(data.get("rss_mib")),
                gpus,
            )
        )

    def _changeover_cleared(self, t_s: float, data: Mapping[str, Any]) -> None:
        changeover = self._changeover(t_s, data)
        changeover.cleared, changeover.end_s = mapping(data.get("clearance")), t_s

    # the end

    def _before(self, changeover: ChangeoverDraft, following: ChangeoverDraft | None) -> str | None:
        """The phase that started next, unless another changeover came first."""
        limit = following.start_s if following else float("inf")
        after = [name for start_s, name in self.starts if changeover.start_s < start_s <= limit]
        return after[0] if after else None

    def view(self) -> RunView:
        run = self.run
        changeovers = self.changeovers
        pairs = zip(changeovers, [*changeovers[1:], None], strict=False)
        if self.unknown:
            known = ", ".join(f"{name} ({count})" for name, count in sorted(self.unknown.items()))
            self.remarks.append(f"Events that this version does not know were left out: {known}.")
        return RunView(
            name=text(run.get("name")),
            run_id=text(run.get("run_id")),
            state=self.state,
            reason=self.reason,
            seconds=self.seconds,
            exit_code=self.exit_code,
            started_wall=self.first_wall,
            host=run.get("host"),
            argv=tuple(str(word) for word in sequence(run.get("argv"))),
            versions=mapping(run.get("versions")),
            spec=run.get("spec"),
            model=mapping(run.get("model")),
            sessions=tuple(_session_view(session) for session in self.sessions),
            phases=tuple(phase.view() for phase in self.phases),
            changeovers=tuple(
                changeover.view(index, self._before(changeover, follower))
                for index, (changeover, follower) in enumerate(pairs, 1)
            ),
            span_s=self.last_s,
            event_count=self.count,
            last_event=self.last.event if self.last else None,
            last_wall=number(self.last.t_wall) if self.last else None,
            remarks=tuple(self.remarks),
        )


def _session_view(session: Mapping[str, Any]) -> Session:
    data = mapping(session["data"])
    return Session(
        span=Span(session["start_s"], session["end_s"]),
        started_wall=session["wall"],
        pid=whole(data.get("pid")),
        boot_id=text(data.get("boot_id")),
        after_seq=whole(data.get("after_seq")),
    )
