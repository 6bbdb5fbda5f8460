"""What the rest of the program may ask of an engine. Facts are frozen dataclasses; an engine is stateless.

An engine says how a server is started, how to see that it serves, how busy it is, how its work is let run
out, and under which names it counts speculation. It starts nothing itself: a :class:`ServerCommand` is data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from changeover.engines import http

Profile = Literal["production", "capture", "speculative"]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class LaunchSpec:
    """One server to be started. ``capture_dir`` belongs to profile ``capture``, ``drafter`` to
    ``speculative``.

    ``python`` is the interpreter of the engine's own environment. ``flags`` are appended as they are; ``env``
    is added.
    """

    profile: Profile
    model_path: Path
    port: int
    python: str
    host: str = LOOPBACK
    served_name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    tensor_parallel: int = 1
    memory_fraction: float | None = None
    context_length: int | None = None
    max_concurrency: int | None = None
    capture_dir: Path | None = None
    aux_boundaries: tuple[int, ...] = ()
    drafter: Path | None = None
    draft_tokens: int = 3
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerCommand:
    """How a server is started: ``argv`` (never a shell string), ``env`` to add, every port it will hold, its
    address.

    ``notes`` are for people: what was chosen and why.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    ports: tuple[int, ...]
    url: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadReading:
    """Requests in the server now."""

    running: int
    waiting: int

    @property
    def total(self) -> int:
        return self.running + self.waiting


@dataclass(frozen=True)
class SpeculationMetrics:
    """Names in the server's Prometheus text; None where the engine has no such counter.

    Acceptance length = 1 + accepted / drafts, or the gauge ``acceptance_length`` where only that exists.
    """

    drafts: str | None
    draft_tokens: str | None
    accepted_tokens: str | None
    acceptance_length: str | None = None


class Engine(Protocol):
    """SGLang, vLLM, or the embedded one."""

    @property
    def kind(self) -> str: ...

    @property
    def supports_run(self) -> bool:
        """Whether this version can start it, or only plan it."""
        ...

    @property
    def speculation(self) -> SpeculationMetrics: ...

    def refusals(self, launch: LaunchSpec) -> list[str]:
        """Why this server cannot work, whatever the machine; empty where nothing speaks against it. No
        I/O.
        """
        ...

    def server_command(self, launch: LaunchSpec) -> ServerCommand: ...

    def is_ready(self, url: str) -> bool:
        """Whether the server says that it serves; False where it does not answer. At most two seconds."""
        ...

    def load(self, url: str) -> LoadReading | None:
        """Running and waiting requests; None where the server does not say."""
        ...

    def drain(self, command: ServerCommand) -> ServerDrain: ...


@dataclass(frozen=True)
class ServerDrain:
    """Lets a server end its work (``changeover.teardown.footprint.Drain``).

    ``path`` is what is posted so that the server refuses new work; None where the engine has no such thing
    and draining means that the senders were stopped and the gauge is watched.
    """

    engine: Engine
    url: str
    path: str | None

    @property
    def name(self) -> str:
        return f"POST {self.path}" if self.path is not None else "senders stopped, watching running requests"

    def begin(self) -> None:
        """Raises OSError or http.HttpError where the server does not take it."""
        if self.path is not None:
            http.post_json(self.url + self.path, {}, timeout_s=http.QUICK_TIMEOUT_S)

    def running(self) -> int | None:
        reading = self.engine.load(self.url)
        return None if reading is None else reading.total

    def proves_idle(self) -> bool:
        return False

    def cut(self) -> None:
        pass


def is_healthy(url: str) -> bool:
    """``/health`` answers 200; every engine here has it."""
    try:
        return http.get(url + "/health", timeout_s=http.QUICK_TIMEOUT_S).status == 200
    except (OSError, http.HttpError):
        return False


def generate_one_token(url: str, *, timeout_s: float) -> None:
    """The only proof of readiness that counts: the server generates. Raises OSError or http.HttpError
    otherwise.
    """
    models = http.get_json(url + "/v1/models", timeout_s=http.QUICK_TIMEOUT_S)
    name = models["data"][0]["id"]
    body = {"model": name, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
    answer = http.post_json(url + "/v1/completions", body, timeout_s=timeout_s)
    if not answer.get("choices"):
        raise http.HttpError(f"a completion without choices: {str(answer)[:200]}")


def read_gauge(metrics: str, name: str) -> float | None:
    """The sum of a metric over its labels in Prometheus text; None where it is not there."""
    pattern = re.compile(rf"^{re.escape(name)}(?:\{{[^}}]*\}})?\s+(\S+)", re.MULTILINE)
    values = [float(value) for value in pattern.findall(metrics)]
    return sum(values) if values else None


def load_from_metrics(url: str, running: str, waiting: str) -> LoadReading | None:
    """Two gauges of ``/metrics``; None where the server does not answer or does not have them."""
    try:
        text = http.get(url + "/metrics", timeout_s=http.QUICK_TIMEOUT_S).text
    except (OSError, http.HttpError):
        return None
    now, later = read_gauge(text, running), read_gauge(text, waiting)
    if now is None or later is None:
        return None
    return LoadReading(int(now), int(later))
