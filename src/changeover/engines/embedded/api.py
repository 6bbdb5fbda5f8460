"""The HTTP routes. Names and shapes are OpenAI's where OpenAI has them; the rest is in docs/design.md."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from aiohttp import web

from changeover.engines.embedded.metrics import render
from changeover.engines.embedded.openai import (
    GenerationRequest,
    RequestRefused,
    ResponseShape,
    parse_chat,
    parse_completion,
    usage_of,
)
from changeover.engines.embedded.service import Loaded, Service, Stage

if TYPE_CHECKING:
    from changeover.engines.embedded.sequence import Sequence

log = logging.getLogger("changeover.embedded")

MAX_BODY_BYTES = 64 * 2**20

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(service: Service) -> web.Application:
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_json])
    routes = Routes(service)
    app.router.add_get("/health", routes.health)
    app.router.add_get("/metrics", routes.metrics)
    app.router.add_get("/v1/models", routes.models)
    app.router.add_post("/v1/completions", routes.completions)
    app.router.add_post("/v1/chat/completions", routes.chat_completions)
    app.router.add_post("/drain", routes.drain)
    return app


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestRefused as refused:
        return _error(refused)
    except web.HTTPException as error:
        return _error(RequestRefused(f"{request.method} {request.path}: {error.reason}", status=error.status))
    except ConnectionResetError:
        raise
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return _error(RequestRefused(f"{type(error).__name__}: {error}", status=500))


def _error(refused: RequestRefused) -> web.Response:
    return web.json_response(refused.to_json(), status=refused.status)


class Routes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = int(time.time())

    async def health(self, _request: web.Request) -> web.Response:
        stage = self._service.stage
        return web.json_response({"status": stage.value}, status=200 if stage is Stage.READY else 503)

    async def metrics(self, _request: web.Request) -> web.Response:
        service = self._service
        text = render(
            service.counters,
            running=service.running,
            waiting=service.waiting,
            model=service.config.served_name,
        )
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def models(self, _request: web.Request) -> web.Response:
        name = self._service.config.served_name
        model = {"id": name, "object": "model", "created": self._started, "owned_by": "changeover"}
        return web.json_response({"object": "list", "data": [model]})

    async def drain(self, _request: web.Request) -> web.Response:
        service = self._service
        service.drain()
        return web.json_response(
            {"status": service.stage.value, "running": service.running, "waiting": service.waiting}
        )

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, parse_completion)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, parse_chat)

    async def _generate(
        self, http: web.Request, parse: Callable[[Any], GenerationRequest]
    ) -> web.StreamResponse:
        async with self._service.admitted() as loaded:
            try:
                body = await http.json()
            except ValueError as error:
                raise RequestRefused(f"the body must be JSON: {error}") from error
            request = parse(body)
            self._check_model(request.model)
            shape = ResponseShape(
                request_id=("chatcmpl-" if request.chat else "cmpl-") + uuid.uuid4().hex,
                created=int(time.time()),
                model=self._service.config.served_name,
                chat=request.chat,
            )
            if request.stream:
                return await self._stream(http, loaded, request, shape)
            return await self._whole(loaded, request, shape)

    def _check_model(self, name: str | None) -> None:
        config = self._service.config
        if name is not None and name not in (config.served_name, str(config.model), config.model.name):
            raise RequestRefused(
                f"this server serves {config.served_name!r}, not {name!r}", param="model", status=404
            )

    async def _whole(
        self, loaded: Loaded, request: GenerationRequest, shape: ResponseShape
    ) -> web.StreamResponse:
        sequence = self._service.new_sequence(loaded, request)
        parts, reason = [], "stop"
        async for event in self._service.generate(loaded, sequence):
            parts.append(event.text)
            reason = event.finish_reason or reason
        answer = shape.whole("".join(parts), reason, final_usage(sequence))
        if request.capture_name is not None:
            answer["capture"] = await self._service.write_capture(sequence, request.capture_name)
        return web.json_response(answer)

    async def _stream(
        self, http: web.Request, loaded: Loaded, request: GenerationRequest, shape: ResponseShape
    ) -> web.StreamResponse:
        sequence = self._service.new_sequence(loaded, request)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        await response.prepare(http)
        try:
            if (opening := shape.first_chunk()) is not None:
                await _send(response, opening)
            async with aclosing(self._service.generate(loaded, sequence)) as events:
                async for event in events:
                    if event.text or event.finish_reason is not None:
                        so_far = (
                            usage_of(len(sequence.prompt_ids), event.completion_tokens)
                            if request.continuous_usage
                            else None
                        )
                        await _send(response, shape.chunk(event.text, event.finish_reason, so_far))
            usage = final_usage(sequence) if request.include_usage else None
            if usage is not None or request.capture_name is not None:
                tail = shape.last_chunk(usage)
                if request.capture_name is not None:
                    tail["capture"] = await self._service.write_capture(sequence, request.capture_name)
                await _send(response, tail)
            await response.write(b"data: [DONE]\n\n")
        except RequestRefused as refused:
            # The status line has gone out already; the error is the stream's last event, and no [DONE]
            # follows.
            await _send(response, refused.to_json())
        except OSError as error:
            if isinstance(error, ConnectionResetError):
                raise
            await _send(response, RequestRefused(f"the capture failed: {error}", status=500).to_json())
        await response.write_eof()
        return response


def final_usage(sequence: Sequence) -> dict[str, Any]:
    """The counts of a finished request; of one that was served with a drafter, its ``speculation`` too."""
    usage: dict[str, Any] = usage_of(len(sequence.prompt_ids), sequence.generated)
    if (speculation := sequence.speculation) is not None:
        usage["speculation"] = speculation
    return usage


async def _send(response: web.StreamResponse, value: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n")
