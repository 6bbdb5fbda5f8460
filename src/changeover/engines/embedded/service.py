"""The server's life between HTTP and the model: loading, serving, draining; requests in, events out."""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from changeover.engines.embedded.config import ServerConfig
from changeover.engines.embedded.metrics import Counters
from changeover.engines.embedded.openai import GenerationRequest, RequestRefused, sequence_of_ids

if TYPE_CHECKING:
    from changeover.engines.embedded.scheduler import Deliveries, Scheduler
    from changeover.engines.embedded.sequence import Generated, Sequence
    from changeover.engines.embedded.target import TargetModel

log = logging.getLogger("changeover.embedded")


class Stage(enum.StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True)
class Loaded:
    """What the model's thread brought up."""

    target: TargetModel
    tokenizer: Any
    scheduler: Scheduler
    boundaries: tuple[int, ...]
    context_tokens: int


class Service:
    """One model and its requests. Everything but ``_model_thread`` runs in the event loop."""

    def __init__(self, config: ServerConfig, on_fatal: Callable[[BaseException], None]) -> None:
        self.config = config
        self.counters = Counters()
        self._draining = False
        self._loaded: Loaded | None = None
        self._on_fatal = on_fatal
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._queues: dict[int, asyncio.Queue[Generated]] = {}
        self._writers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="capture-writer")
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        threading.Thread(target=self._model_thread, name="model", daemon=True).start()

    @property
    def stage(self) -> Stage:
        if self._draining:
            return Stage.DRAINING
        return Stage.READY if self._loaded is not None else Stage.LOADING

    @property
    def waiting(self) -> int:
        return self._loaded.scheduler.waiting if self._loaded is not None else 0

    @property
    def running(self) -> int:
        """Requests whose answer is not finished, the writing of their capture included."""
        return max(0, self._in_flight - self.waiting)

    def drain(self) -> None:
        if not self._draining:
            log.info("draining: new requests are refused, %d run on", self._in_flight)
        self._draining = True

    async def drained(self) -> None:
        await self._idle.wait()

    def cancel_all(self) -> None:
        """End every request now, with what it has."""
        from changeover.engines.embedded.sequence import Generated

        for queue in self._queues.values():
            queue.put_nowait(Generated("", 0, "error", "the server is stopping"))

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[Loaded]:
        """A request's place in the server, from its acceptance to the last byte of its answer."""
        if self.stage is not Stage.READY or self._loaded is None:
            raise RequestRefused(f"the server is {self.stage.value}", status=503)
        self._in_flight += 1
        self._idle.clear()
        try:
            yield self._loaded
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    def new_sequence(self, loaded: Loaded, request: GenerationRequest) -> Sequence:
        """Tokenize and check against the model and the server's settings."""
        from changeover.engines.embedded.capture import CaptureRows
        from changeover.engines.embedded.sequence import Sequence

        capture = None
        if request.capture_name is not None:
            if self.config.capture_dir is None:
                raise RequestRefused("this server was started without --capture-dir", param="capture")
            capture = CaptureRows(loaded.boundaries)
        prompt_ids = self._prompt_ids(loaded, request)
        context = loaded.context_tokens
        room = context - len(prompt_ids)
        wanted = request.max_tokens if request.max_tokens is not None else room
        if room < 1 or wanted > room:
            raise RequestRefused(
                f"the context holds {context} tokens; the prompt has {len(prompt_ids)} and "
                f"{wanted if room >= 1 else 'at least 1'} more were asked for",
                param="max_tokens" if room >= 1 else "prompt",
            )
        return Sequence(
            prompt_ids=prompt_ids,
            params=request.sampling(wanted),
            tokenizer=loaded.tokenizer,
            eos_token_ids=loaded.target.eos_token_ids,
            capture=capture,
        )

    def _prompt_ids(self, loaded: Loaded, request: GenerationRequest) -> list[int]:
        tokenizer = loaded.tokenizer
        if request.token_ids is not None:
            ids = sequence_of_ids(request.token_ids, loaded.target.vocab)
        elif request.text is not None:
            ids = list(tokenizer.encode(request.text))
        else:
            ids = list(tokenizer.encode(self._chat_text(tokenizer, request), add_special_tokens=False))
        if not ids:
            raise RequestRefused("the prompt has no tokens", param="prompt")
        return ids

    @staticmethod
    def _chat_text(tokenizer: Any, request: GenerationRequest) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(
                    list(request.messages or ()), tokenize=False, add_generation_prompt=True
                )
            )
        except Exception as error:
            # The template is the model's own program; whatever it raises is about these messages.
            raise RequestRefused(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error

    async def generate(self, loaded: Loaded, sequence: Sequence) -> AsyncGenerator[Generated]:
        """The request's events up to the one with a ``finish_reason``; leaving early cancels it."""
        queue: asyncio.Queue[Generated] = asyncio.Queue()
        self._queues[id(sequence)] = queue
        loaded.scheduler.submit(sequence)
        try:
            while True:
                event = await queue.get()
                if event.error is not None:
                    raise RequestRefused(event.error, status=500)
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            del self._queues[id(sequence)]
            loaded.scheduler.cancel(sequence)

    async def write_capture(self, sequence: Sequence, name: str) -> dict[str, Any]:
        from changeover.engines.embedded.capture import write_capture

        assert self.config.capture_dir is not None and sequence.capture is not None
        return await self._loop.run_in_executor(
            self._writers,
            write_capture,
            self.config.capture_dir,
            name,
            sequence.capture,
            sequence.token_ids,
            len(sequence.prompt_ids),
        )

    def _deliver(self, deliveries: Deliveries) -> None:
        """Called by the model's thread: one hop into the event loop a step, not one a token."""
        if deliveries:
            self._loop.call_soon_threadsafe(self._hand_out, deliveries)

    def _hand_out(self, deliveries: Deliveries) -> None:
        for sequence, event in deliveries:
            queue = self._queues.get(id(sequence))
            if queue is not None:
                queue.put_nowait(event)

    def _model_thread(self) -> None:
        try:
            loaded = self._load()
        except BaseException as error:  # noqa: BLE001 - whatever it was, the server cannot serve and must say so
            self._loop.call_soon_threadsafe(self._on_fatal, error)
            return
        self._loop.call_soon_threadsafe(self._now_ready, loaded)
        loaded.scheduler.run_forever()

    def _now_ready(self, loaded: Loaded) -> None:
        self._loaded = loaded
        log.info("ready on http://%s:%d", self.config.host, self.config.port)

    def _load(self) -> Loaded:
        config = self.config
        log.info("importing torch and transformers")
        import torch
        from transformers import AutoTokenizer

        from changeover.engines.embedded.eagle3 import load_drafter
        from changeover.engines.embedded.scheduler import Scheduler
        from changeover.engines.embedded.target import default_boundaries, load_target

        torch.set_num_threads(config.threads)
        target = load_target(config.model, device=config.device, dtype=config.dtype)
        tokenizer = AutoTokenizer.from_pretrained(config.model, local_files_only=True)
        boundaries: tuple[int, ...] = ()
        if config.capture_dir is not None:
            config.capture_dir.mkdir(parents=True, exist_ok=True)
            boundaries = config.aux_boundaries or default_boundaries(target.layers)
            target.watch_boundaries(boundaries)
            log.info("capturing boundaries %s into %s", boundaries, config.capture_dir)
        drafter = None
        if config.drafter is not None:
            drafter = load_drafter(config.drafter, target, draft_tokens=config.draft_tokens)
        scheduler = Scheduler(
            target,
            drafter,
            max_concurrency=config.max_concurrency,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            counters=self.counters,
            deliver=self._deliver,
        )
        context = min(config.max_model_len or target.context_tokens, target.context_tokens)
        log.info("context %d tokens, %d threads", context, config.threads)
        return Loaded(target, tokenizer, scheduler, boundaries, context)
