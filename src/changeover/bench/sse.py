"""Server-sent events out of a byte stream that may be cut anywhere.

Follows the WHATWG HTML standard, section 9.2.6 "Interpreting an event stream", for what OpenAI-compatible
servers send: ``data`` fields joined by newlines, comments and other fields skipped, LF or CRLF line ends (a
lone CR is not taken as a line end). Unlike the standard, an event that the end of the stream cuts off before
its blank line is still given out by :meth:`EventStream.close`, because several servers end with
``data: [DONE]\\n``.
"""

from __future__ import annotations


class EventStream:
    """Feed bytes as they come; get the ``data`` of each event that is complete."""

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """The events that ``received`` completes, oldest first."""
        lines = (self._tail + received).split(b"\n")
        self._tail = lines.pop()
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events

    def close(self) -> list[bytes]:
        """What the end of the stream leaves: at most one event."""
        return self.feed(b"\n\n") if self._tail or self._data else []
