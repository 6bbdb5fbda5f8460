"""Continuous batching in one thread: admit, feed, sample, hand out; then again.

Every step feeds each running sequence what it still has to feed: a chunk of its prompt, or its newest token
(with drafted tokens behind it where a drafter runs). Requests beyond ``max_concurrency`` wait in order of
arrival.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from changeover.engines.embedded.eagle3 import Eagle3Drafter
from changeover.engines.embedded.metrics import Counters
from changeover.engines.embedded.sampling import sample
from changeover.engines.embedded.sequence import Generated, Sequence
from changeover.engines.embedded.speculation import accepted_prefix, draft_budget
from changeover.engines.embedded.target import Segment, TargetModel, TargetOutput

log = logging.getLogger("changeover.embedded")

Deliveries = list[tuple[Sequence, Generated]]


@dataclass(frozen=True)
class Plan:
    """What one step feeds of one sequence; ``samples`` says whether its last rows give new tokens."""

    sequence: Sequence
    fed_ids: tuple[int, ...]
    drafted: tuple[int, ...]
    samples: bool


class Scheduler:
    """Owns the model's thread. ``submit`` and ``cancel`` may be called from any thread."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Eagle3Drafter | None,
        *,
        max_concurrency: int,
        prefill_chunk_tokens: int,
        counters: Counters,
        deliver: Callable[[Deliveries], None],
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._max_concurrency = max_concurrency
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._counters = counters
        self._deliver = deliver
        self._wake = threading.Condition()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, sequence: Sequence) -> None:
        with self._wake:
            self._waiting.append(sequence)
            self._wake.notify()

    def cancel(self, sequence: Sequence) -> None:
        """Forget a request whose client has gone; takes effect at the next step."""
        with self._wake:
            sequence.cancelled = True
            if sequence in self._waiting:
                self._waiting.remove(sequence)

    def run_forever(self) -> None:
        """The thread's body. A fault in one step ends the requests of that step with an error, not the
        server.
        """
        while True:
            with self._wake:
                while not self._waiting and not self._running:
                    self._wake.wait()
                self._admit()
            try:
                self._deliver(self.step())
            except Exception as error:
                log.exception("a step failed; its %d requests end with an error", len(self._running))
                failed, self._running = self._running, []
                message = f"{type(error).__name__}: {error}"
                self._deliver([(one, Generated("", one.generated, "error", message)) for one in failed])

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_concurrency:
            sequence = self._waiting.popleft()
            sequence.cache = self._target.new_cache()
            if self._drafter is not None and sequence.params.greedy:
                sequence.draft = self._drafter.new_state()
            self._running.append(sequence)

    def step(self) -> Deliveries:
        """Feed every running sequence once; return what became new."""
        self._running = [one for one in self._running if not one.cancelled]
        plans = self._plan()
        if not plans:
            return []
        segments: list[Segment] = []
        logit_rows: list[int] = []
        row = 0
        for plan in plans:
            assert plan.sequence.cache is not None
            fed = plan.fed_ids + plan.drafted
            segments.append(Segment(fed, plan.sequence.cache))
            row += len(fed)
            if plan.samples:
                logit_rows.extend(range(row - 1 - len(plan.drafted), row))
        output = self._target.forward(
            segments, logit_rows, want_last=any(plan.sequence.capture for plan in plans)
        )
        return self._advance(plans, output)

    def _plan(self) -> list[Plan]:
        """Decode and verify rows always; prompts share ``prefill_chunk_tokens`` a step, so that decoding
        never starves.
        """
        budget = self._prefill_chunk_tokens
        plans = []
        for sequence in self._running:
            assert sequence.cache is not None
            pending = sequence.token_ids[sequence.cache.length :]
            if sequence.generated == 0:
                pending, whole = pending[:budget], len(pending) <= budget
                budget -= len(pending)
                if pending:
                    plans.append(Plan(sequence, tuple(pending), (), whole))
                continue
            drafted: tuple[int, ...] = ()
            if sequence.draft is not None:
                room = draft_budget(
                    remaining_tokens=sequence.remaining,
                    fed_after_pending=len(sequence.token_ids),
                    context_tokens=self._target.context_tokens,
                )
                drafted = tuple(sequence.draft.drafted[:room])
            plans.append(Plan(sequence, tuple(pending), drafted, True))
        return plans

    def _advance(self, plans: list[Plan], output: TargetOutput) -> Deliveries:
        deliveries: Deliveries = []
        greedy = output.logits.argmax(dim=-1).tolist()
        at = 0
        for index, plan in enumerate(plans):
            sequence = plan.sequence
            assert sequence.cache is not None
            if sequence.capture is not None:
                assert output.last is not None
                sequence.capture.add(output.batch.rows(index), output.boundaries, output.last)
            if not plan.samples:
                continue
            rows = 1 + len(plan.drafted)
            if sequence.params.greedy:
                chosen = accepted_prefix(plan.drafted, greedy[at : at + rows])
            else:
                chosen = [sample(output.logits[at], sequence.params, sequence.generator)]
            at += rows
            # Rejected drafts leave the cache; the accepted ones and the pending token stay.
            sequence.cache.length -= len(plan.drafted) - (len(chosen) - 1)
            first = sequence.generated == 0
            text, taken = _take(sequence, chosen)
            self._count(plan, taken, first)
            deliveries.append((sequence, Generated(text, sequence.generated, sequence.finish_reason)))
        self._running = [one for one in self._running if one.finish_reason is None]
        if self._drafter is not None:
            going = [(plan.sequence, output.batch.rows(index)) for index, plan in enumerate(plans)]
            self._drafter.extend_and_draft(
                [(one, rows) for one, rows in going if one.draft is not None and one.finish_reason is None],
                output,
            )
        return deliveries

    def _count(self, plan: Plan, taken: int, first: bool) -> None:
        counters, sequence = self._counters, plan.sequence
        counters.generation_tokens += taken
        if first:
            counters.prompt_tokens += len(sequence.prompt_ids)
        if plan.drafted:
            counters.spec_drafts += 1
            counters.spec_draft_tokens += len(plan.drafted)
            counters.spec_accepted_tokens += taken - 1
            sequence.drafts += 1
            sequence.draft_tokens += len(plan.drafted)
            sequence.accepted_tokens += taken - 1


def _take(sequence: Sequence, chosen: Iterable[int]) -> tuple[str, int]:
    """Give the chosen tokens to the sequence until one of them ends it; the text and how many were taken."""
    text, taken = "", 0
    for token_id in chosen:
        text += sequence.accept(token_id)
        taken += 1
        if sequence.finish_reason is not None:
            break
    return text, taken
