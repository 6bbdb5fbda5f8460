import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from changeover.machine.clock import SystemClock
from changeover.pipeline.journal import Event as JournalEvent
from changeover.pipeline.journal import (
    EventName,
    Journal,
    JournalDamaged,
    decode_event,
    encode_event,
    read_events,
)

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def write(path: Path, count: int) -> None:
    journal = Journal(path, SystemClock())
    for number in range(count):
        journal.append(EventName.JOB_STARTED, phase="p", job=f"j{number}")
    journal.close()


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4), st.integers(0, 10**9))
def test_an_event_comes_back_as_it_was_written(data, seq):
    event = JournalEvent(seq, 1.5, 2.5, "job.done", data)
    assert decode_event(encode_event(event)) == event


@given(st.data())
def test_no_changed_byte_goes_unnoticed(data):
    line = bytearray(encode_event(JournalEvent(7, 1.5, 2.5, "job.done", {"phase": "train", "tokens": 1234})))
    position = data.draw(st.integers(0, len(line) - 2))
    bit = data.draw(st.integers(0, 7))
    before = decode_event(bytes(line))
    line[position] ^= 1 << bit
    assert decode_event(bytes(line)) != before or json.loads(line) == json.loads(encode_event(before))


def test_nan_is_refused_because_strict_json_has_none(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl", SystemClock())
    with pytest.raises(ValueError, match="JSON compliant"):
        journal.append(EventName.JOB_DONE, result=float("nan"))
    journal.append(EventName.JOB_DONE, result=1.0)
    assert [event.seq for event in read_events(tmp_path / "journal.jsonl")] == [0]


@pytest.mark.parametrize("cut", range(1, 90, 11))
def test_a_torn_last_line_is_cut_off_and_the_journal_goes_on(tmp_path, cut):
    path = tmp_path / "journal.jsonl"
    write(path, 3)
    raw = path.read_bytes()
    last = raw.rstrip(b"\n").rfind(b"\n") + 1
    path.write_bytes(raw[: last + cut])
    assert len(read_events(path)) == 2
    journal = Journal(path, SystemClock())
    assert journal.append(EventName.RUN_RESUMED, pid=1).seq == 2
    assert [event.seq for event in read_events(path)] == [0, 1, 2]


def test_a_bad_line_in_the_middle_is_an_error_with_its_place(tmp_path):
    path = tmp_path / "journal.jsonl"
    write(path, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b"j1", b"j9") + lines[2])
    with pytest.raises(JournalDamaged, match="event 1 with a matching CRC at byte"):
        read_events(path)


def test_a_missing_line_is_an_error(tmp_path):
    path = tmp_path / "journal.jsonl"
    write(path, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2] + lines[3])
    with pytest.raises(JournalDamaged):
        read_events(path)


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, SystemClock())
    journal.append(EventName.RUN_STARTED, run_id="r")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, line, at: real(fd, line[:10], at))
    with pytest.raises(OSError, match="could be written"):
        journal.append(EventName.PHASE_STARTED, phase="p")
    monkeypatch.undo()
    journal.append(EventName.PHASE_STARTED, phase="p")
    assert [event.seq for event in read_events(path)] == [0, 1]


def test_an_event_is_on_the_disk_before_its_listener_hears_of_it(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, SystemClock())
    seen = []
    journal.listen(lambda event: seen.append(read_events(path)[-1] == event))
    journal.append(EventName.CHANGEOVER_SIGNAL, pid=1)
    assert seen == [True]


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError])
def test_a_view_that_fails_is_dropped_and_the_run_goes_on(tmp_path, error):
    journal = Journal(tmp_path / "journal.jsonl", SystemClock())
    calls = []

    def closed_terminal(event):
        calls.append(event)
        raise error

    journal.listen(closed_terminal)
    journal.append(EventName.RUN_STARTED, run_id="r")
    journal.append(EventName.PHASE_STARTED, phase="p")
    assert len(calls) == 1
    assert len(read_events(tmp_path / "journal.jsonl")) == 2
