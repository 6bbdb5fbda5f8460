"""What one request got, as facts: when each chunk came, how many tokens the server counted, why it failed.

A chunk of a speculative server may hold several tokens, and a chunk with an empty text may hold one (a
special token, half of a character). So chunks are never counted as tokens: the counts are the server's own
``usage``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import orjson

from changeover.bench.acceptance import COUNTS, Acceptance

# Finish reasons with which a server says that it gave up on the request although HTTP said 200:
# SGLang answers {"finish_reason": "abort"}, vLLM "abort" and "error".
FAILED_FINISHES = frozenset({"abort", "error"})
# SGLang 0.5.23, SpecTokensDetails: verify steps, drafts proposed, drafts found correct.
_SGLANG_COUNTS = ("spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts")


@dataclass(frozen=True)
class Failure:
    """Why a request did not succeed: ``reason`` is a word to count by, ``detail`` what was seen."""

    reason: str
    detail: str


@dataclass(frozen=True)
class Arrival:
    """A chunk that carried tokens: when it came, and the tokens so far if the server said (else None)."""

    at_s: float
    output_tokens: int | None


@dataclass(frozen=True)
class Answer:
    """One request from plan to end. Times are in seconds on one monotonic clock.

    ``planned_s`` is when the load wanted it sent, ``sent_s`` when its last byte was handed to the socket
    (None: never), ``last_s`` when the last chunk with tokens or with the finish reason came, ``ended_s`` when
    the response ended. ``text`` holds all that was generated (reasoning and tool calls included).
    ``speculation`` is what the server says it drafted for this request (the embedded server does).
    """

    index: int
    prompt_id: str
    planned_s: float
    sent_s: float | None
    arrivals: tuple[Arrival, ...]
    last_s: float | None
    ended_s: float
    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    speculation: Acceptance | None
    failure: Failure | None

    @property
    def text_hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the text: equal texts, equal hashes."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


class AnswerReader:
    """Reads the events of one streamed chat or text completion; ``failure`` stays None while all is well."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.texts: list[str] = []
        self.last_s: float | None = None
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] = {}
        self.sglang_speculation: dict[str, Any] | None = None
        self.done = False
        self.failure: Failure | None = None

    def accept(self, event: bytes, at_s: float) -> None:
        """Take one event's data, which arrived at ``at_s``."""
        if event == b"[DONE]":
            self.done = True
            return
        try:
            chunk = orjson.loads(event)
        except orjson.JSONDecodeError as error:
            self._fail("bad event", f"{error}: {_shorten(event)}")
            return
        if not isinstance(chunk, dict):
            self._fail("bad event", f"not an object: {_shorten(event)}")
        elif chunk.get("error") or chunk.get("object") == "error":
            self._fail("error event", _shorten(event))
        else:
            self._accept_chunk(chunk, at_s)

    def _accept_chunk(self, chunk: dict[str, Any], at_s: float) -> None:
        before = self.output_tokens
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        sglext = chunk.get("sglext")
        if isinstance(sglext, dict) and isinstance(sglext.get("spec_tokens_details"), dict):
            self.sglang_speculation = sglext["spec_tokens_details"]
        choices = chunk.get("choices") or []
        if not choices:  # the closing usage chunk: a count, not an arrival
            return
        choice = choices[0]
        finish = choice.get("finish_reason")
        text = generated_text(choice)
        counted = isinstance(usage, dict) and (self.output_tokens or 0) > (before or 0)
        # A first count in the finishing chunk is the total of a server that counts only once, not a token.
        counted = counted and (before is not None or finish is None)
        if text or choice.get("token_ids") or counted:
            self.texts.append(text)
            self.arrivals.append(Arrival(at_s, self.output_tokens))
            self.last_s = at_s
        if finish is not None:
            self.finish_reason = str(finish)
            self.last_s = at_s
            if finish in FAILED_FINISHES:
                self._fail("aborted", f"finish_reason {finish!r} after {len(self.arrivals)} chunks")

    @property
    def output_tokens(self) -> int | None:
        return _count(self.usage.get("completion_tokens"))

    @property
    def prompt_tokens(self) -> int | None:
        return _count(self.usage.get("prompt_tokens"))

    @property
    def cached_tokens(self) -> int | None:
        details = self.usage.get("prompt_tokens_details")
        return _count(details.get("cached_tokens")) if isinstance(details, dict) else None

    @property
    def speculation(self) -> Acceptance | None:
        said, names = self.usage.get("speculation"), COUNTS
        if self.sglang_speculation is not None:
            said, names = self.sglang_speculation, _SGLANG_COUNTS
        if not isinstance(said, dict):
            return None
        counts = [_count(said.get(name)) for name in names]
        known = [count for count in counts if count is not None]
        return Acceptance(*known) if len(known) == len(counts) else None

    def close(self) -> None:
        """The stream has ended: judge whether the answer is whole."""
        if self.finish_reason is None:
            self._fail(
                "cut off", f"the stream ended without a finish_reason after {len(self.arrivals)} chunks"
            )

    def _fail(self, reason: str, detail: str) -> None:
        if self.failure is None:
            self.failure = Failure(reason, detail)


def generated_text(choice: dict[str, Any]) -> str:
    """All that the model generated in one streamed choice: answer, reasoning, tool calls.

    Reasoning is ``reasoning_content`` in SGLang and older vLLM, ``reasoning`` in newer vLLM.
    """
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return choice.get("text") or ""
    parts = [delta.get("reasoning_content") or delta.get("reasoning") or "", delta.get("content") or ""]
    if delta.get("tool_calls"):
        parts.append(orjson.dumps(delta["tool_calls"]).decode())
    return "".join(parts)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _shorten(data: bytes, limit: int = 200) -> str:
    text = data.decode("utf-8", "replace")
    return text if len(text) <= limit else text[:limit] + "..."
