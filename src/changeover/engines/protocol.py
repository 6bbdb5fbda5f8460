"""What the rest of the program may ask of an engine. Facts are frozen dataclasses; an engine is stateless.

An engine says how a server is started, how to see that it serves, how busy it is, how its work is let run
out, and under which names it counts speculation. It starts nothing itself: a :class:`ServerCommand` is data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from changeover.machine import http
from changeover.machine.bounded import first_on_python_path
from changeover.teardown.drains import LoadReading
from changeover.teardown.footprint import Drain, StopPolicy

__all__ = [
    "LOOPBACK",
    "Engine",
    "LaunchSpec",
    "LoadReading",
    "Profile",
    "ServerCommand",
    "SpeculationMetrics",
    "generate_one_token",
    "is_healthy",
    "load_or_none",
    "side_environment",
]

Profile = Literal["production", "capture", "speculative"]

LOOPBACK = "127.0.0.1"
SIDE = Path(__file__).parent / "side"


@dataclass(frozen=True)
class LaunchSpec:
    """One server to be started. ``capture_dir`` belongs to profile ``capture``, ``drafter`` to ``speculative``.

    ``overlay`` is a folder that holds the engine's package with our patch in it: the states come through that.
    ``layers`` are the target's, where they are known. ``python`` is the interpreter of the engine's own environment.
    ``flags`` are appended as they are; ``env`` is added.
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
    overlay: Path | None = None
    layers: int | None = None
    drafter: Path | None = None
    draft_tokens: int = 3
    draft_top_k: int = 1
    verify_tokens: int | None = None
    attention_backend: str | None = None
    continuous_decode_steps: int | None = None
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
class SpeculationMetrics:
    """Names in the server's Prometheus text; None where the engine has no such counter.

    Acceptance length = 1 + accepted / drafts; the gauge ``acceptance_length`` is named where there are no counters.
    ``by_request``: each answer says its own counts. ``verify_steps`` counts those of finished requests: with
    the tokens generated, they too tell what was accepted.
    """

    drafts: str | None
    draft_tokens: str | None
    accepted_tokens: str | None
    acceptance_length: str | None = None
    by_request: bool = False
    verify_steps: str | None = None


class Engine(Protocol):
    """SGLang, vLLM, or the embedded one."""

    @property
    def kind(self) -> str: ...

    def claimed_share(self, launch: LaunchSpec) -> float | None:
        """The share of a device's whole memory that must be free when it starts; None where it takes what there is."""
        ...

    @property
    def server_module(self) -> str | None:
        """What to import, to have read all that its server runs; None where it runs what we run."""
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

    @property
    def default_stop(self) -> StopPolicy:
        """How it is best ended once it is proven idle, by measurement."""
        ...

    def drain(self, command: ServerCommand) -> Drain | None: ...


def side_environment(*before: Path) -> dict[str, str]:
    """So that an engine finds what it is to load of ours (``engines/side``), before what the user's own path has."""
    folders = os.pathsep.join(map(str, (*before, SIDE)))
    return {"PYTHONPATH": first_on_python_path(folders, os.environ)}


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


def load_or_none(read: Callable[[str], LoadReading | None], url: str) -> LoadReading | None:
    """What a server says of its load; None where it does not answer either."""
    try:
        return read(url)
    except (OSError, http.HttpError):
        return None
