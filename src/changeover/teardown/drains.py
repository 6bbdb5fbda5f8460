"""How each engine lets its work run out, over HTTP; teardown's :class:`~changeover.teardown.footprint.Drain`.

Read in SGLang 0.5.23 (``http_server.py``, ``v1_loads.py``, ``tokenizer_manager.py``) and vLLM 0.33.0
(``entrypoints/serve``). Two endpoints are never asked: SGLang's ``/health``, since one failed check during a long
prefill makes it skip its own drain, and vLLM's ``/load``, which says 0 unless a flag was given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from changeover.machine import http
from changeover.teardown.footprint import Drain

_NOT_OFFERED = (404, 405, 501)
_NEEDS_KEY = (401, 403)


@dataclass(frozen=True)
class LoadReading:
    """Requests in the server now."""

    running: int
    waiting: int

    @property
    def total(self) -> int:
        return self.running + self.waiting


class KeyNeeded(http.HttpError):
    """The server wants an API key for this."""


def read_gauge(metrics: str, name: str) -> float | None:
    """The sum of a metric over its labels in Prometheus text; None where it is not there."""
    pattern = re.compile(rf"^{re.escape(name)}(?:\{{[^}}]*\}})?\s+(\S+)", re.MULTILINE)
    values = [float(value) for value in pattern.findall(metrics)]
    return sum(values) if values else None


def embedded_load(url: str, token: str | None = None) -> LoadReading | None:
    return _gauges(url, "changeover:num_requests_running", "changeover:num_requests_waiting", token)


def vllm_load(url: str, token: str | None = None) -> LoadReading | None:
    return _gauges(url, "vllm:num_requests_running", "vllm:num_requests_waiting", token)


def sglang_load(url: str, token: str | None = None) -> LoadReading | None:
    """Summed over data-parallel ranks; needs no metrics flag. None where the server does not say."""
    answer = http.get(url + "/v1/loads?include=core", timeout_s=http.QUICK_TIMEOUT_S, token=token)
    _expect_no_key("/v1/loads", answer)
    if answer.status != 200:
        return None
    said = http.as_json("/v1/loads", answer)
    ranks = said.get("loads", []) if isinstance(said, dict) else said
    if not ranks:
        return None
    return LoadReading(
        sum(int(rank["num_running_reqs"]) for rank in ranks),
        sum(int(rank["num_waiting_reqs"]) for rank in ranks),
    )


@dataclass(frozen=True)
class EmbeddedDrain:
    """``POST /drain`` refuses new work; running work ends."""

    url: str
    name = "POST /drain"

    def begin(self) -> None:
        """Raises OSError or http.HttpError where the server does not take it."""
        http.post_json(self.url + "/drain", {}, timeout_s=http.QUICK_TIMEOUT_S)

    def running(self) -> int | None:
        return _total(embedded_load(self.url))

    def proves_idle(self) -> bool:
        return False

    def cut(self) -> None:
        """Nothing to ask for: its SIGTERM ends what is left in its own time."""


@dataclass(frozen=True)
class SglangDrain:
    """SGLang refuses no new work, so that the senders are stopped before, and its gauge is watched."""

    url: str
    token: str | None = field(default=None, repr=False)
    name = "senders stopped, watching /v1/loads"

    def begin(self) -> None:
        """Nothing to ask for: SGLang has no way to refuse new work and go on."""

    def running(self) -> int | None:
        return _total(sglang_load(self.url, self.token))

    def proves_idle(self) -> bool:
        """``/flush_cache`` is answered with 200 only when nothing runs and nothing waits."""
        answer = http.post(self.url + "/flush_cache", {}, timeout_s=http.QUICK_TIMEOUT_S, token=self.token)
        _expect_no_key("/flush_cache", answer)
        return answer.status == 200

    def cut(self) -> None:
        """Abort everything: its own SIGTERM would wait for the last request without any bound."""
        body = {"rid": "", "abort_all": True}
        answer = http.post(
            self.url + "/abort_request", body, timeout_s=http.QUICK_TIMEOUT_S, token=self.token
        )
        _expect_no_key("/abort_request", answer)


@dataclass(frozen=True)
class VllmDrain:
    """``POST /pause?mode=wait`` where the server was started with ``VLLM_SERVER_DEV_MODE=1``; else the gauges alone."""

    url: str
    token: str | None = field(default=None, repr=False)
    name = "POST /pause?mode=wait where offered, watching /metrics"

    def begin(self) -> None:
        try:
            answer = http.post(
                self.url + "/pause?mode=wait", {}, timeout_s=http.QUICK_TIMEOUT_S, token=self.token
            )
        except TimeoutError:
            return  # it answers when the last request has ended; new ones are refused meanwhile
        _expect_no_key("/pause", answer)
        if answer.status not in (200, *_NOT_OFFERED):
            raise http.HttpError(f"/pause answered {answer.status}: {answer.text[:200]}")

    def running(self) -> int | None:
        return _total(vllm_load(self.url, self.token))

    def proves_idle(self) -> bool:
        return False

    def cut(self) -> None:
        """Nothing to ask for: SIGTERM aborts what runs (``--shutdown-timeout``)."""


_DRAINS: Mapping[str, Callable[[str, str | None], Drain]] = {
    "embedded": lambda url, _token: EmbeddedDrain(url),
    "sglang": SglangDrain,
    "vllm": VllmDrain,
}


def drain_for(engine: str | None, url: str | None, token: str | None = None) -> Drain | None:
    """The drain of an engine by its name (``embedded``, ``sglang``, ``vllm``) and address; None for any other.

    ``token`` is an API key, where the server was started with one; it is in no record and no repr.
    """
    make = _DRAINS.get(engine or "")
    return make(url, token) if make is not None and url is not None else None


def _gauges(url: str, running: str, waiting: str, token: str | None) -> LoadReading | None:
    """Two gauges of ``/metrics``; None where the server does not have them."""
    answer = http.get(url + "/metrics", timeout_s=http.QUICK_TIMEOUT_S, token=token)
    _expect_no_key("/metrics", answer)
    now, later = read_gauge(answer.text, running), read_gauge(answer.text, waiting)
    if now is None or later is None:
        return None
    return LoadReading(int(now), int(later))


def _total(reading: LoadReading | None) -> int | None:
    return None if reading is None else reading.total


def _expect_no_key(path: str, answer: http.Answer) -> None:
    if answer.status in _NEEDS_KEY:
        raise KeyNeeded(f"{path} answered {answer.status}: the server wants an API key (--api-key-env)")
