"""What a journal says about a run: a pure reading, from which resume, status and teardown all start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from changeover.machine.processes import ProcessIdentity
from changeover.pipeline.journal import Event, EventName
from changeover.teardown.observer import terminated_by


class RunVerdict(StrEnum):
    """The end of a run; ``open`` where no end was written."""

    OPEN = "open"
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass
class StartedProcess:
    """A server or a job that a phase started, or was about to start (``leader`` None)."""

    name: str
    kind: str
    ports: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    leader: ProcessIdentity | None = None
    cgroup: str | None = None
    engine: str | None = None
    url: str | None = None
    stop: str | None = None
    members: set[ProcessIdentity] = field(default_factory=set)
    segments: list[dict[str, Any]] = field(default_factory=list)
    sockets: list[dict[str, Any]] = field(default_factory=list)
    derived_ports: tuple[int, ...] = ()


@dataclass
class FinishedJob:
    """A job that wrote its result: what it was asked (digest), and what stands where."""

    kind: str
    digest: str
    result: dict[str, Any]
    outputs: list[dict[str, Any]]


@dataclass
class PhaseState:
    """One phase as far as it went."""

    name: str
    index: int
    digest: str = ""
    baseline: dict[str, Any] | None = None
    processes: dict[str, StartedProcess] = field(default_factory=dict)
    jobs: dict[str, FinishedJob] = field(default_factory=dict)
    clearance: dict[str, Any] | None = None
    clearance_seq: int | None = None
    done: bool = False
    terminated: set[ProcessIdentity] = field(
        default_factory=set
    )  # by a teardown that has not come to its end

    @property
    def unclear(self) -> bool:
        """Whether something was started here and the machine was not proven clean since."""
        return bool(self.processes)


@dataclass
class RunState:
    """The whole run."""

    run_id: str = ""
    spec: dict[str, Any] = field(default_factory=dict)
    boot_id: str = ""
    verdict: RunVerdict = RunVerdict.OPEN
    reason: str = ""
    seconds: float | None = None
    exit_code: int | None = None
    phases: dict[str, PhaseState] = field(default_factory=dict)
    last_clearance_seq: int | None = None

    def phase(self, name: str) -> PhaseState:
        return self.phases[name]


_ENDS = {
    EventName.RUN_DONE: RunVerdict.DONE,
    EventName.RUN_FAILED: RunVerdict.FAILED,
    EventName.RUN_INTERRUPTED: RunVerdict.INTERRUPTED,
}


def read_state(events: Iterable[Event]) -> RunState:
    """Fold the events, in order, into a state."""
    state = RunState()
    for event in events:
        _apply(state, event)
    return state


def _apply(state: RunState, event: Event) -> None:
    data = event.data
    match event.event:
        case EventName.RUN_STARTED:
            state.run_id, state.spec, state.boot_id = data["run_id"], data["spec"], data["boot_id"]
        case EventName.RUN_RESUMED:
            state.boot_id, state.verdict, state.reason = data["boot_id"], RunVerdict.OPEN, ""
            state.seconds, state.exit_code = None, None
        case EventName.RUN_DONE | EventName.RUN_FAILED | EventName.RUN_INTERRUPTED:
            state.verdict = _ENDS[EventName(event.event)]
            state.reason, state.seconds = data.get("reason", ""), data.get("seconds")
            state.exit_code = data.get("exit_code")
        case EventName.PHASE_STARTED:
            phase = state.phases.setdefault(data["phase"], PhaseState(data["phase"], data["index"]))
            if (
                phase.digest != data["digest"]
            ):  # asked for something else: what was done before does not count
                phase.jobs.clear()
            phase.digest, phase.done = data["digest"], False
        case _ if "phase" in data and data["phase"] in state.phases:
            _apply_to_phase(state, state.phases[data["phase"]], event)
        case _:
            pass


def _apply_to_phase(state: RunState, phase: PhaseState, event: Event) -> None:
    data = event.data
    match event.event:
        case EventName.BASELINE_TAKEN:
            phase.baseline = data["baseline"]
        case EventName.SERVER_STARTING:
            phase.processes["server"] = StartedProcess(
                "server",
                "server",
                ports=tuple(data["ports"]),
                cgroup=data.get("cgroup"),
                engine=data["engine"],
                url=data["url"],
                stop=data.get("stop"),
            )
        case EventName.JOB_STARTING:
            phase.processes[data["job"]] = StartedProcess(
                data["job"], data["kind"], files=tuple(data["files"]), cgroup=data.get("cgroup")
            )
        case EventName.AHEAD_STARTING:
            phase.processes["ahead"] = StartedProcess("ahead", "ahead", cgroup=data.get("cgroup"))
        case EventName.AHEAD_STARTED:
            phase.processes["ahead"].leader = ProcessIdentity(**data["leader"])
        case EventName.SERVER_STARTED | EventName.JOB_STARTED:
            process = phase.processes[data.get("job", "server")]
            process.leader = ProcessIdentity(**data["leader"])
        case EventName.SERVER_MEMBERS:
            process = phase.processes[data["process"]]
            process.members |= {ProcessIdentity(**member) for member in data["members"]}
            process.segments = data["segments"]
            process.sockets = data.get("sockets", [])
            process.derived_ports = tuple(data.get("derived_ports", ()))
        case EventName.CHANGEOVER_DELIVERED:
            terminated = terminated_by(data, state.boot_id)
            phase.terminated |= {terminated} if terminated is not None else set()
        case EventName.JOB_DONE:
            phase.jobs[data["job"]] = FinishedJob(
                data["kind"], data["digest"], data["result"], data["outputs"]
            )
        case EventName.CHANGEOVER_CLEARED:
            phase.clearance, phase.clearance_seq = data["clearance"], event.seq
            phase.terminated.clear()
            if data["clearance"]["verdict"] == "clean":
                phase.processes.clear()
                state.last_clearance_seq = event.seq
        case EventName.PHASE_DONE:
            phase.done = True
        case _:
            pass
