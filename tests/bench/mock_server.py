"""A scripted OpenAI-compatible server on loopback, in a thread of its own, that records what it is asked.

Each test says with a :class:`Script` what a request gets: the chunks (tokens in each), the pause
before each, and how it ends. Facts about order and counts are exact; pauses only bound times from below.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Script:
    """How one request is answered. ``chunks`` gives the tokens of each chunk."""

    chunks: tuple[int, ...] = (1,) * 8
    first_pause_s: float = 0.0
    pause_s: float = 0.0
    text: str = "ab "
    role_chunk: bool = True
    usage: bool = True
    usage_in_chunks: bool = True
    speculation: dict[str, int] | None = None
    sglext: dict[str, Any] | None = None
    cached_tokens: int | None = None
    finish: str | None = "stop"
    status: int = 200
    error_after: int | None = None
    reset_after: int | None = None
    stall_after: int | None = None
    done: bool = True


@dataclass
class MockServer:
    """What the server was asked (``bodies`` in order of arrival) and its counters.

    No request is answered before ``hold_until`` of them have been running at once.
    """

    script: Callable[[dict[str, Any], int], Script]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    running: int = 0
    peak: int = 0
    metrics: Callable[[], str] | None = None
    models: tuple[str, ...] = ("mock",)
    generated: int = 0
    hold_until: int = 0
    url: str = ""

    def __post_init__(self) -> None:
        self._enough = asyncio.Event()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.arrived_s.append(time.monotonic())
        self.bodies.append(body)
        script = self.script(body, len(self.bodies) - 1)
        self.running += 1
        self.peak = max(self.peak, self.running)
        if self.peak >= self.hold_until:
            self._enough.set()
        try:
            await asyncio.wait_for(self._enough.wait(), 30)
            return await self._answer(request, body, script)
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], script: Script) -> web.StreamResponse:
        if script.status != 200:
            return web.json_response({"error": {"message": "draining"}}, status=script.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = "messages" in body

        async def send(choices: list[dict[str, Any]], tokens: int | None) -> None:
            chunk: dict[str, Any] = {"object": "chunk", "choices": choices}
            if tokens is not None:
                chunk["usage"] = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
                if script.cached_tokens is not None:
                    chunk["usage"]["prompt_tokens_details"] = {"cached_tokens": script.cached_tokens}
                if script.speculation is not None and not choices:
                    chunk["usage"]["speculation"] = script.speculation
            if script.sglext is not None and not choices:
                chunk["sglext"] = script.sglext
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

        def choice(text: str, finish: str | None = None) -> dict[str, Any]:
            piece = {"delta": {"content": text} if text else {}} if chat else {"text": text}
            return {"index": 0, **piece, "finish_reason": finish}

        if chat and script.role_chunk:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            await send([role], 0 if script.usage_in_chunks else None)
        await asyncio.sleep(script.first_pause_s)
        tokens = 0
        for number, size in enumerate(script.chunks):
            if script.reset_after == number:
                assert request.transport is not None
                request.transport.abort()
                return response
            if script.error_after == number:
                await response.write(b'data: {"error": {"message": "out of memory", "code": 500}}\n\n')
                return response
            if script.stall_after == number:
                await asyncio.sleep(3600)
            if number:
                await asyncio.sleep(script.pause_s)
            tokens += size
            self.generated += size
            await send([choice(script.text * size)], tokens if script.usage_in_chunks else None)
        if script.finish is not None:
            await send([choice("", script.finish)], tokens if script.usage_in_chunks else None)
        if script.usage:
            await send([], tokens)
        if script.done:
            await response.write(b"data: [DONE]\n\n")
        return response

    async def list_models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def show_metrics(self, _: web.Request) -> web.Response:
        if self.metrics is None:
            return web.Response(status=404)
        return web.Response(text=self.metrics())


@contextmanager
def serving(script: Script | Callable[[dict[str, Any], int], Script], **options: Any) -> Iterator[MockServer]:
    """Run a mock server until the block ends; its address is ``.url``."""
    server = MockServer(script if callable(script) else lambda _body, _number: script, **options)
    loop = asyncio.new_event_loop()
    started, stop = threading.Event(), asyncio.Event()

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", server.complete)
        app.router.add_post("/v1/completions", server.complete)
        app.router.add_get("/v1/models", server.list_models)
        app.router.add_get("/metrics", server.show_metrics)
        runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert started.wait(20), "the mock server did not start"
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        assert not thread.is_alive(), "the mock server did not stop"
        loop.close()
