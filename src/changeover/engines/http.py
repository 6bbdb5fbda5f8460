"""Small blocking requests to a server on this machine, each with its timeout; no proxy, no redirect, no
retry.
"""

from __future__ import annotations

import http.client
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


def get(url: str, *, timeout_s: float) -> Answer:
    """Any status is an answer. Raises OSError (no connection, timeout) or HttpError (not HTTP)."""
    return _request("GET", url, None, timeout_s)


def get_json(url: str, *, timeout_s: float) -> Any:
    """Raises HttpError for a status that is not 200 or a body that is not JSON."""
    return _as_json(url, _request("GET", url, None, timeout_s))


def post_json(url: str, body: Any, *, timeout_s: float) -> Any:
    """Raises HttpError for a status that is not 200 or a body that is not JSON."""
    return _as_json(url, _request("POST", url, json.dumps(body).encode(), timeout_s))


def _request(method: str, url: str, body: bytes | None, timeout_s: float) -> Answer:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise HttpError(f"expected an address like http://127.0.0.1:8000, saw {url}")
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request(method, path or "/", body, {"Content-Type": "application/json"} if body else {})
        response = connection.getresponse()
        return Answer(response.status, response.read(MAX_ANSWER_BYTES).decode(errors="replace"))
    except http.client.HTTPException as error:
        raise HttpError(f"{method} {url}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _as_json(url: str, answer: Answer) -> Any:
    if answer.status != 200:
        raise HttpError(f"{url} answered {answer.status}: {answer.text[:300]}")
    try:
        return json.loads(answer.text) if answer.text else {}
    except ValueError as error:
        raise HttpError(f"{url} did not answer with JSON: {answer.text[:300]}") from error
