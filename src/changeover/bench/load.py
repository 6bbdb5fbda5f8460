"""What is sent, and when: the requests of a load, and the closed loop that keeps a number of them running.

Every repeat, level and server gets the same prompts in the same order, so that two results can be compared
request by request. The warm-up takes prompts that are never measured: sending request 0 itself would put its
prefix into the server's cache (vllm#54227).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from changeover.bench.answer import Answer
from changeover.bench.client import Request
from changeover.machine.errors import InvalidInput
from changeover.states.prompts import Prompt

Api = Literal["chat", "completions"]
ROUTES: dict[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
LAG_PERIOD_S = 0.01


@dataclass(frozen=True)
class Load:
    """The prompts of a benchmark: ``measured`` in sending order (cycled where there are few), ``warm_up``."""

    measured: tuple[Prompt, ...]
    warm_up: tuple[Prompt, ...]
    distinct: int
    sha256: str


@dataclass(frozen=True)
class Sampling:
    """How the server is asked to generate; ``engine`` decides which fields it can be sent."""

    api: Api
    model: str
    engine: str
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool


def plan_load(prompts: Sequence[Prompt], requests: int | None, warm_up: int, api: Api) -> Load:
    """Choose the prompts: the last ``warm_up`` to warm up, the first ``requests`` of the others to measure
    (None: each of them once).

    Raises:
        InvalidInput: fewer than ``warm_up`` + 1 prompts, or chat prompts for the completions API.
    """
    available = len(prompts) - warm_up
    if available < 1:
        raise InvalidInput(
            expected=f"at least {warm_up + 1} prompts: {warm_up} for the warm-up and others to measure",
            seen=f"{len(prompts)}",
            todo="Add prompts, or lower --warmup.",
        )
    if api == "completions":
        chat = next((prompt for prompt in prompts if prompt.text is None), None)
        if chat is not None:
            raise InvalidInput(
                expected="prompts of plain text for the completions API",
                seen=f"prompt {chat.id} made of messages",
                todo="Use --api chat, or give prompts with `text`.",
            )
    wanted = available if requests is None else requests
    distinct = min(wanted, available)
    measured = tuple(prompts[index % distinct] for index in range(wanted))
    content = json.dumps([prompt_input(prompt, api) for prompt in measured], sort_keys=True).encode()
    return Load(measured, tuple(prompts[available:]), distinct, hashlib.sha256(content).hexdigest())


def prompt_input(prompt: Prompt, api: Api) -> dict[str, Any]:
    """The part of the request that holds the prompt; plain text becomes one user message in a chat."""
    if api == "completions":
        return {"prompt": prompt.text}
    if prompt.messages is None:
        return {"messages": [{"role": "user", "content": prompt.text}]}
    return {"messages": [{"role": message.role, "content": message.content} for message in prompt.messages]}


def build_requests(prompts: Sequence[Prompt], sampling: Sampling, salt: str) -> list[Request]:
    """The bodies to POST. ``salt`` differs between repeats and keeps one out of another's prefix cache.

    vLLM and SGLang take ``cache_salt`` (it separates their prefix caches without changing the prompt; vLLM 0.32 refuses
    one with "/", "@" or more than 128 characters) and
    ``continuous_usage_stats`` (the token count in every chunk, which tells how many tokens the first one
    held). The embedded server takes the latter; a server that we do not know is sent neither, as some refuse
    unknown fields.
    """
    stream_options = {"include_usage": True}
    if sampling.engine in ("embedded", "vllm", "sglang"):
        stream_options["continuous_usage_stats"] = True
    requests = []
    for index, prompt in enumerate(prompts):
        body: dict[str, Any] = {
            "model": sampling.model,
            **prompt_input(prompt, sampling.api),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "stream": True,
            "stream_options": stream_options,
        }
        if sampling.ignore_eos:
            body["ignore_eos"] = True
        if sampling.engine in ("vllm", "sglang"):
            body["cache_salt"] = f"{salt}:{index}"
        if sampling.engine == "sglang":  # it counts drafts by request only; sent to no other server
            body["return_spec_tokens_details"] = True
        requests.append(Request(index, prompt.id, json.dumps(body).encode()))
    return requests


async def closed_loop(
    ask: Callable[[Request, float], Awaitable[Answer]],
    requests: Sequence[Request],
    concurrency: int,
    now: Callable[[], float],
    on_answer: Callable[[Answer], None],
) -> list[Answer]:
    """Keep ``concurrency`` requests running until all are answered; the answers in the order of ``requests``.

    A request is planned for the moment its slot becomes free, so ``sent_s - planned_s`` is the client's own
    delay.
    """
    answers: dict[int, Answer] = {}
    waiting = iter(requests)
    started_s = now()

    async def slot() -> None:
        free_s = started_s
        for request in waiting:
            answer = await ask(request, free_s)
            answers[request.index] = answer
            free_s = answer.ended_s
            on_answer(answer)

    async with asyncio.TaskGroup() as slots:
        for _ in range(min(concurrency, len(requests))):
            slots.create_task(slot())
    return [answers[request.index] for request in requests]


class LoopLag:
    """Measures how late the event loop runs its timers: what every time stamp of the client may be off by."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.lags_s: list[float] = []
        self._now = now

    async def watch(self) -> None:
        """Runs until cancelled; one sample each 10 ms."""
        while True:
            due_s = self._now() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self.lags_s.append(max(0.0, self._now() - due_s))
