"""Small blocking requests to a server on this machine, each with its timeout; no proxy, no redirect, no
retry. ``token`` is sent as a bearer token and never shows in what is raised.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

QUICK_TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 16 * 2**20


class HttpError(Exception):
    """The server answered, but not with what was asked for."""


@dataclass(frozen=True)
class Answer:
    status: int
    text: str


def get(url: str, *, timeout_s: float, token: str | None = None) -> Answer:
    """Any status is an answer. Raises OSError (no connection, timeout) or HttpError (not HTTP)."""
    return _request("GET", url, None, timeout_s, token)


def get_json(url: str, *, timeout_s: float, token: str | None = None) -> Any:
    """Raises HttpError for a status that is not 200 or a body that is not JSON."""
    return as_json(url, _request("GET", url, None, timeout_s, token))


def post(url: str, body: Any, *, timeout_s: float, token: str | None = None) -> Answer:
    """Any status is an answer. Raises OSError (no connection, timeout) or HttpError (not HTTP)."""
    return _request("POST", url, json.dumps(body).encode(), timeout_s, token)


def post_json(url: str, body: Any, *, timeout_s: float, token: str | None = None) -> Any:
    """Raises HttpError for a status that is not 200 or a body that is not JSON."""
    return as_json(url, post(url, body, timeout_s=timeout_s, token=token))


def _request(method: str, url: str, body: bytes | None, timeout_s: float, token: str | None) -> Answer:
    import http.client  # 15 ms, which a teardown without a server to ask need not pay

    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise HttpError(f"expected an address like http://127.0.0.1:8000, saw {url}")
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    headers = {"Content-Type": "application/json"} if body else {}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    try:
        connection.request(method, path or "/", body, headers)
        response = connection.getresponse()
        return Answer(response.status, response.read(MAX_ANSWER_BYTES).decode(errors="replace"))
    except http.client.HTTPException as error:
        raise HttpError(f"{method} {url}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def as_json(url: str, answer: Answer) -> Any:
    """The body of an answer; raises HttpError for a status that is not 200 or a body that is not JSON."""
    if answer.status != 200:
        raise HttpError(f"{url} answered {answer.status}: {answer.text[:300]}")
    try:
        return json.loads(answer.text) if answer.text else {}
    except ValueError as error:
        raise HttpError(f"{url} did not answer with JSON: {answer.text[:300]}") from error
