"""From token ids to streamed text: incremental detokenization and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of a growing list of token ids, given out only when no later token can change it.

    A token may hold half a character, and many tokenizers drop or add a space at a word's start. So each new
    piece is the difference of two decodes that share a few earlier tokens as context, and a piece that ends
    in the replacement character waits for the rest of its character.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        self._read = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        before, after = self._decode(self._read), self._decode(len(self._ids))
        if after.endswith(REPLACEMENT) or len(after) <= len(before):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        """What was still waiting; a character that was never completed shows as the replacement character."""
        before, after = self._decode(self._read), self._decode(len(self._ids))
        self._context = self._read = len(self._ids)
        return after[len(before) :]

    def _decode(self, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[self._context : end], skip_special_tokens=True))


class StopStrings:
    """Holds text back while it might be the beginning of a stop string; the stop string itself is never given
    out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            given, self._held = self._held[: min(found)], ""
            return given
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        given, self._held = self._held[:cut], self._held[cut:]
        return given

    def finish(self) -> str:
        given, self._held = self._held, ""
        return given


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
