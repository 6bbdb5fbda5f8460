"""One request while the scheduler runs it, and the events that it sends back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from changeover.engines.embedded.capture import CaptureRows
from changeover.engines.embedded.packed import SequenceCache
from changeover.engines.embedded.sampling import SamplingParams, new_generator
from changeover.engines.embedded.text import Detokenizer, StopStrings

if TYPE_CHECKING:
    from changeover.engines.embedded.eagle3 import DraftState


@dataclass(frozen=True)
class Generated:
    """Something new for a request: text (may be empty), and at the end a reason (``stop``, ``length``,
    ``error``).
    """

    text: str
    completion_tokens: int
    finish_reason: str | None = None
    error: str | None = None


@dataclass(eq=False)
class Sequence:
    """A request's tokens, cache and text. Only the scheduler's thread touches it after submission.

    ``token_ids`` holds prompt and generated tokens; ``cache.length`` says how many of them were fed. ``drafts``,
    ``draft_tokens`` and ``accepted_tokens`` count as the server's ``Counters`` do, for this request alone.
    """

    prompt_ids: list[int]
    params: SamplingParams
    tokenizer: Any
    eos_token_ids: frozenset[int]
    capture: CaptureRows | None = None
    cache: SequenceCache | None = None
    draft: DraftState | None = None
    cancelled: bool = False
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    finish_reason: str | None = None
    token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)
        self.generator = new_generator(self.params)
        self._detokenizer = Detokenizer(self.tokenizer)
        self._stops = StopStrings(self.params.stop)

    @property
    def generated(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def remaining(self) -> int:
        return self.params.max_tokens - self.generated

    @property
    def speculation(self) -> dict[str, int] | None:
        """What was drafted for this request and accepted; None when it is served without a drafter."""
        if self.draft is None:
            return None
        return {
            "drafts": self.drafts,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
        }

    def accept(self, token_id: int) -> str:
        """Take one generated token; set ``finish_reason`` if it is the last one; return the text it
        completes.
        """
        self.token_ids.append(token_id)
        if token_id in self.eos_token_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
            return self._stops.push(self._detokenizer.finish()) + self._stops.finish()
        text = self._stops.push(self._detokenizer.push(token_id))
        if self._stops.stopped:
            self.finish_reason = "stop"
        elif self.remaining == 0:
            self.finish_reason = "length"
            text += self._stops.push(self._detokenizer.finish())
            text += self._stops.finish()
            if self._stops.stopped:
                self.finish_reason = "stop"
        return text
