"""Events come out whole however the network cuts the bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from changeover.bench.sse import EventStream

payloads = st.lists(
    st.binary(min_size=1).filter(lambda data: b"\n" not in data and b"\r" not in data), max_size=6
)


def read(*pieces: bytes) -> list[bytes]:
    stream = EventStream()
    events = [event for piece in pieces for event in stream.feed(piece)]
    return events + stream.close()


@given(payloads, st.sampled_from([b"\n", b"\r\n"]), st.data())
def test_any_cut_gives_the_same_events(payloads: list[bytes], end: bytes, data: st.DataObject) -> None:
    wire = b"".join(b"data: " + payload + end + end for payload in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    pieces = [wire[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    assert read(*pieces) == payloads


def test_comments_and_other_fields_are_no_events() -> None:
    assert read(b": ping\n\nevent: error\nid: 7\ndata: x\n\nretry: 5\n\n") == [b"x"]


def test_data_lines_of_one_event_are_joined() -> None:
    assert read(b"data: a\ndata: b\n\n") == [b"a\nb"]


def test_a_space_after_the_colon_is_optional() -> None:
    assert read(b"data:{}\n\ndata:  x\n\n") == [b"{}", b" x"]


def test_last_event_without_blank_line_is_given_out() -> None:
    assert read(b"data: [DONE]\n") == [b"[DONE]"]
    assert read(b"data: [DONE]") == [b"[DONE]"]
