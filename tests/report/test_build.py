"""The fold from events to the view."""

from __future__ import annotations

from pathlib import Path

import pytest

from changeover.pipeline.journal import Event, encode_event, read_events
from changeover.report.build import build_view
from changeover.report.timing import place_in_time
from tests.report import journals


def test_finished_run_has_its_parts():
    run = build_view(journals.finished())
    assert (run.state, run.run_id, run.host) == ("done", "20260528-202640-laptop", "laptop")
    assert [phase.name for phase in run.phases] == ["baseline", "capture", "train", "speculative"]
    assert all(phase.state == "done" for phase in run.phases)
    assert [job.kind for job in run.jobs] == ["bench", "collect", "train", "bench", "compare"]
    assert [c.verdict for c in run.changeovers] == ["clean"] * 4
    assert [(c.after, c.before) for c in run.changeovers] == [
        ("baseline", "capture"),
        ("capture", "train"),
        ("train", "speculative"),
        ("speculative", None),
    ]
    assert run.remarks == ()
    assert run.seconds == pytest.approx(run.span_s)


def test_starting_and_started_are_one_job():
    run = build_view(journals.finished())
    assert len(run.jobs_of_kind("train")) == 1
    assert len(run.jobs_of_kind("train")[0].progress) == 4


def test_job_that_was_announced_but_never_started_is_shown_open():
    events = journals.finished()
    cut = next(index for index, event in enumerate(events) if event.event == "job.starting") + 1
    run = build_view(events[:cut])
    assert [(job.name, job.state) for job in run.jobs] == [("bench", "unfinished")]


def test_changeover_has_stages_signals_samples_and_evidence():
    changeover = build_view(journals.finished()).changeovers[0]
    assert [stage.name for stage in changeover.stages][:3] == ["plan", "drain", "terminate"]
    assert [(s.signal, s.pid, s.proof) for s in changeover.signals] == [
        ("SIGTERM", 4100, "forked by this run; pidfd held")
    ]
    assert changeover.samples[0].processes == 2
    assert changeover.samples[-1].rss_mib == 0.0
    assert changeover.clearance is not None
    assert [e.item for e in changeover.clearance.evidence] == ["processes", "port:41000", "shm", "gpu"]


def test_sender_signalled_before_the_changeover_is_announced_belongs_to_it():
    events = journals.finished()
    at = next(index for index, event in enumerate(events) if event.event == "changeover.started")
    early = {"phase": "baseline", "pid": 5000, "start_ticks": 1, "signal": "SIGTERM", "proof": "a sender"}
    sent = Event(events[at].seq, events[at].t_wall, events[at].t_mono, "changeover.signal", early)
    later = [Event(e.seq + 1, e.t_wall, e.t_mono, e.event, e.data) for e in events[at:]]
    run = build_view([*events[:at], sent, *later])
    assert len(run.changeovers) == 4
    assert [signal.pid for signal in run.changeovers[0].signals] == [5000, 4100]
    assert run.changeovers[0].targets


def test_members_of_a_job_make_no_server():
    events = [
        Event(0, 1.0, 1.0, "phase.started", {"phase": "train", "index": 0}),
        Event(1, 2.0, 2.0, "server.members", {"phase": "train", "process": "train", "members": [{"pid": 7}]}),
    ]
    phase = build_view(events).phases[0]
    assert phase.servers == ()
    assert [(member.process, member.pid) for member in phase.members] == [("train", "7")]


def test_failed_run_says_why():
    run = build_view(journals.failed())
    assert (run.state, run.reason) == ("failed", "phase capture failed")
    assert [phase.state for phase in run.phases] == ["done", "failed"]
    assert run.changeovers[-1].verdict == "foreign_holder"
    job = run.jobs_of_kind("collect")[0]
    assert job.state == "failed"
    assert job.log_tail is not None
    assert journals.HOSTILE in job.log_tail


def test_resumed_run_counts_attempts_and_the_time_between():
    run = build_view(journals.resumed())
    assert run.state == "done"
    assert [(phase.name, phase.attempt) for phase in run.phases if phase.name == "train"] == [
        ("train", 1),
        ("train", 2),
    ]
    first, second = run.sessions
    assert first.span.end_s is not None
    assert second.span.start_s - first.span.end_s == pytest.approx(900.0)
    assert first.boot_id != second.boot_id


def test_resuming_takes_back_the_end_of_the_first_life():
    events = journals.interrupted()
    last = events[-1]
    resumed = Event(last.seq + 1, last.t_wall + 5, 3.0, "run.resumed", {"pid": 9, "after_seq": last.seq})
    assert build_view(events).state == "interrupted"
    assert build_view([*events, resumed]).state == "unfinished"


def test_times_follow_the_monotonic_clock_when_the_wall_clock_is_set_back():
    events = [
        Event(0, 1000.0, 50.0, "run.started", {}),
        Event(1, 400.0, 53.0, "phase.started", {"phase": "a"}),
        Event(2, 410.0, 60.0, "phase.done", {"phase": "a"}),
    ]
    assert [t_s for t_s, _ in place_in_time(events)] == [0.0, 3.0, 10.0]


def test_times_never_go_back_over_a_reboot():
    events = [
        Event(0, 1000.0, 50.0, "run.started", {}),
        Event(1, 1100.0, 150.0, "phase.started", {"phase": "a"}),
        Event(2, 900.0, 1.0, "run.resumed", {}),
        Event(3, 905.0, 6.0, "run.done", {"seconds": 5.0}),
    ]
    assert [t_s for t_s, _ in place_in_time(events)] == [0.0, 100.0, 100.0, 105.0]


def test_torn_journal_is_read_up_to_its_last_whole_line(tmp_path: Path):
    lines = [encode_event(event) for event in journals.finished()]
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"".join(lines[:60]) + lines[60][:40])
    run = build_view(read_events(path))
    assert run.event_count == 60
    assert run.state == "unfinished"


def test_gap_and_unknown_events_are_said():
    events = [
        Event(0, 1.0, 1.0, "run.started", {"name": "x"}),
        Event(3, 2.0, 2.0, "gpu.exploded", {}),
    ]
    remarks = " ".join(build_view(events).remarks)
    assert "from event 0 to 3" in remarks
    assert "gpu.exploded (1)" in remarks
