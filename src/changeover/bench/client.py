"""The HTTP side of the load: one shared session, one streamed request, time stamps as the data arrives.

aiohttp with one shared session: httpx rescans its pool on every request and stops at a few hundred requests
a second (encode/httpx#3215), and a session per request costs a connection each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import orjson

from changeover.bench.answer import Answer, AnswerReader, Failure
from changeover.bench.sse import EventStream
from changeover.machine.errors import ChangeoverError, InvalidInput

# aiohttp pauses the socket at twice this; its default of 64 KiB collapses with long chunks (vllm#39963).
READ_BUFFER_BYTES = 1 << 20
# Shorter than any server's own (uvicorn: 5 s), so that no request is sent into a connection being closed.
KEEPALIVE_S = 1.0
CONTROL_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Request:
    """One request to send: ``body`` is the JSON of the POST, encoded beforehand."""

    index: int
    prompt_id: str
    body: bytes


class Client:
    """An async context manager around one server; ``path`` is the route that generates."""

    def __init__(self, url: str, path: str, timeout_s: float, now: Callable[[], float]) -> None:
        self.base = base_url(url)
        self._route = self.base + path
        self._timeout_s = timeout_s
        self._now = now

    async def __aenter__(self) -> Self:
        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(self._on_sent)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONTROL_TIMEOUT_S),
            read_bufsize=READ_BUFFER_BYTES,
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
            trace_configs=[trace],
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def _on_sent(self, _session: Any, context: SimpleNamespace, _params: Any) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx["sent_s"] = self._now()

    async def ask(self, request: Request, planned_s: float) -> Answer:
        """Send one request and read its stream to the end; a failure is in the answer, never an exception."""
        reader = AnswerReader()
        stamps: dict[str, float] = {}
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(request, reader, stamps)
            reader.close()
        except aiohttp.ClientError as error:  # before TimeoutError: some of these are both
            reader.failure = _connection_failure(error, reader, sent=bool(stamps))
        except TimeoutError:
            seen = f"saw {len(reader.arrivals)} chunks with tokens"
            reader.failure = Failure("timeout", f"no end after {self._timeout_s:g} s; {seen}")
        except OSError as error:
            reader.failure = _connection_failure(error, reader, sent=bool(stamps))
        return Answer(
            index=request.index,
            prompt_id=request.prompt_id,
            planned_s=planned_s,
            sent_s=stamps.get("sent_s"),
            arrivals=tuple(reader.arrivals),
            last_s=reader.last_s,
            ended_s=self._now(),
            text="".join(reader.texts),
            finish_reason=reader.finish_reason,
            prompt_tokens=reader.prompt_tokens,
            output_tokens=reader.output_tokens,
            cached_tokens=reader.cached_tokens,
            speculation=reader.speculation,
            failure=reader.failure,
        )

    async def _stream(self, request: Request, reader: AnswerReader, stamps: dict[str, float]) -> None:
        async with self._session.post(
            self._route, data=request.body, allow_redirects=False, trace_request_ctx=stamps
        ) as response:
            if response.status != 200:
                body = await response.content.read(500)
                reader.failure = Failure(f"HTTP {response.status}", body.decode("utf-8", "replace"))
                return
            events = EventStream()
            head = b""
            async for data in response.content.iter_any():
                at_s = self._now()  # before parsing, so that parsing is not in the figures
                head = head or data[:200]
                for event in events.feed(data):
                    reader.accept(event, at_s)
            for event in events.close():
                reader.accept(event, self._now())
            if not reader.done and reader.finish_reason is None and reader.failure is None:
                seen = head.decode("utf-8", "replace") or "nothing"
                reader.failure = Failure(
                    "cut off", f"{len(reader.arrivals)} chunks with tokens; starts with: {seen}"
                )

    async def model_id(self) -> str:
        """The server's only model, from ``GET /v1/models``.

        Raises:
            ChangeoverError: the server does not answer, or not with a list of models.
            InvalidInput: it has several models.
        """
        url = f"{self.base}/v1/models"
        try:
            status, body = await self._get(url)
            models = [str(entry["id"]) for entry in orjson.loads(body)["data"]]
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ChangeoverError(
                expected=f"a server at {public_url(self.base)}",
                seen=repr(error),
                todo="Start the server (changeover serve), or give its --url.",
            ) from error
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise ChangeoverError(
                expected=f"a list of models from {public_url(url)}",
                seen=f"HTTP {status}: {body[:200]!r}",
                todo="Check that --url is an OpenAI-compatible server that has finished loading.",
            ) from error
        if len(models) != 1:
            raise InvalidInput(
                expected="the name of a model, as the server does not have exactly one",
                seen=", ".join(models) or "no model",
                todo="Name one with --model.",
            )
        return models[0]

    async def metrics_text(self) -> tuple[str | None, str]:
        """``GET /metrics``: the text, or None with the reason why there is none."""
        try:
            status, body = await self._get(f"{self.base}/metrics")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return None, f"GET /metrics: {error!r}"
        if status != 200:
            return None, f"GET /metrics: HTTP {status}"
        return body.decode("utf-8", "replace"), ""

    async def _get(self, url: str) -> tuple[int, bytes]:
        async with (
            asyncio.timeout(CONTROL_TIMEOUT_S),
            self._session.get(url, allow_redirects=False) as response,
        ):
            return response.status, await response.read()


def _connection_failure(error: Exception, reader: AnswerReader, sent: bool) -> Failure:
    reason = "connection lost" if sent else "not sent"
    return Failure(reason, f"{error!r} after {len(reader.arrivals)} chunks with tokens")


def base_url(url: str) -> str:
    """``url`` without its trailing slash and ``/v1``.

    Raises:
        InvalidInput: it is not an http or https URL of a host.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidInput(
            expected="a server's address such as http://127.0.0.1:8000", seen=url, todo="Give it with --url."
        )
    path = parts.path.rstrip("/").removesuffix("/v1")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def public_url(url: str) -> str:
    """``url`` without user, password, query and fragment: what may be written into a result."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
