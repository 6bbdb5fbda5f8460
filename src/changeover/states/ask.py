"""Asking the capture server for one answer, and what its refusals mean."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

from changeover.states.prompts import Prompt

if TYPE_CHECKING:
    import aiohttp

FailureKind = Literal["refused", "invalid", "transport"]
# Statuses that may pass: the server is busy, draining, restarting, or a proxy stands before one that is.
_MAY_PASS = frozenset({408, 425, 429, 500, 502, 503, 504})


class RequestFailed(Exception):  # noqa: N818 - becomes the reason of a failed sample
    """One request failed. ``transport`` may pass (asked again, also on resume); ``refused`` and ``invalid``
    will
    not: the same question gets the same answer."""

    def __init__(self, kind: FailureKind, reason: str) -> None:
        self.kind = kind
        self.reason = reason
        super().__init__(reason)


def request_body(prompt: Prompt, max_tokens: int, capture: Mapping[str, Any]) -> dict[str, Any]:
    """A greedy chat completion, with the fields that have it captured; plain text becomes one user message."""
    if prompt.messages is None:
        messages = [{"role": "user", "content": prompt.text}]
    else:
        messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
    return {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": False,
        **capture,
    }


async def ask(session: aiohttp.ClientSession, url: str, path: str, body: Mapping[str, Any]) -> object:
    """The decoded answer. Raises RequestFailed."""
    import aiohttp
    import orjson

    try:
        async with session.post(url.rstrip("/") + path, json=body) as response:
            raw = await response.read()
            if response.status != 200:
                text = raw[:500].decode(errors="replace")
                kind: FailureKind = "transport" if response.status in _MAY_PASS else "refused"
                raise RequestFailed(kind, f"HTTP {response.status}: {text}")
            return orjson.loads(raw)
    except TimeoutError as error:
        raise RequestFailed("transport", "no answer within the time limit") from error
    except aiohttp.ClientError as error:
        raise RequestFailed("transport", f"{type(error).__name__}: {error}") from error
    except ValueError as error:
        raise RequestFailed("invalid", f"the answer is not JSON: {error}") from error


class ByteBudget:
    """Back-pressure in bytes: who wants to make more than is left waits; who is larger than all of it goes
    alone.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._taken = 0
        self._freed = asyncio.Condition()

    @property
    def taken_bytes(self) -> int:
        return self._taken

    @asynccontextmanager
    async def hold(self, wanted_bytes: int) -> AsyncIterator[None]:
        """Take ``wanted_bytes`` for the time of the block."""
        async with self._freed:
            await self._freed.wait_for(lambda: self._taken == 0 or self._taken + wanted_bytes <= self._total)
            self._taken += wanted_bytes
        try:
            yield
        finally:
            async with self._freed:
                self._taken -= wanted_bytes
                self._freed.notify_all()
