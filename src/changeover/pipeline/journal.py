"""The record of a run; everything shown anywhere is derived from it. Data per event: docs/design.md, "Journal"."""

from __future__ import annotations

from enum import StrEnum

from changeover.machine.record import Event, decode_event, encode_event, read_events
from changeover.machine.record import Record as Journal
from changeover.machine.record import RecordDamaged as JournalDamaged

__all__ = ["Event", "EventName", "Journal", "JournalDamaged", "decode_event", "encode_event", "read_events"]


class EventName(StrEnum):
    """Every event that a run writes."""

    RUN_STARTED = "run.started"
    RUN_RESUMED = "run.resumed"
    RUN_DONE = "run.done"
    RUN_FAILED = "run.failed"
    RUN_INTERRUPTED = "run.interrupted"
    PHASE_STARTED = "phase.started"
    PHASE_DONE = "phase.done"
    PHASE_FAILED = "phase.failed"
    BASELINE_TAKEN = "baseline.taken"
    SERVER_STARTING = "server.starting"
    SERVER_STARTED = "server.started"
    SERVER_MEMBERS = "server.members"
    SERVER_LOADING = "server.loading"
    SERVER_READY = "server.ready"
    JOB_STARTING = "job.starting"
    JOB_STARTED = "job.started"
    JOB_PROGRESS = "job.progress"
    JOB_DONE = "job.done"
    JOB_FAILED = "job.failed"
    AHEAD_CHECKED = "ahead.checked"
    AHEAD_STARTING = "ahead.starting"
    AHEAD_STARTED = "ahead.started"
    AHEAD_DONE = "ahead.done"
    CHANGEOVER_STARTED = "changeover.started"
    CHANGEOVER_STAGE = "changeover.stage"
    CHANGEOVER_SIGNAL = "changeover.signal"
    CHANGEOVER_DELIVERED = "changeover.delivered"
    CHANGEOVER_SAMPLE = "changeover.sample"
    CHANGEOVER_CLEARED = "changeover.cleared"
