"""By which command lines and titles an engine's processes are recognised: as candidates, never as proof.

A title hides the command line (``setproctitle``: ``/proc/PID/cmdline`` is the title alone), so that both are looked
at. Words are compared by their place in argv, never searched for: an editor with ``sglang serve`` in its arguments, a
``grep sglang::`` and a shell whose ``-c`` text holds every pattern are no engines (vllm PR #6965, prime-rl PR #2331),
and ``sgl_diffusion::`` is one although ``sglang`` is not in it (miles_diffusion PR #165).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

TRACKER_MODULE = "multiprocessing.resource_tracker"
_TAKES_A_VALUE = ("-X", "-W", "--check-hash-based-pycs")
_PYTHON = re.compile(r"(python|pypy)[0-9.]*$")


@dataclass(frozen=True)
class EngineProcesses:
    """How one engine's processes show themselves.

    ``title``: what a worker calls itself (SGLang 0.5.23 ``configure_scheduler_process``, vLLM 0.33.0
    ``set_process_title``; vLLM's prefix can be changed by ``VLLM_PROCESS_NAME_PREFIX``). ``modules`` and ``programs``:
    what its launcher is started as; a program counts only with its sub-command. ``port``: the default of ``--port``.
    """

    title: re.Pattern[str]
    modules: tuple[str, ...]
    program: str | None
    port: int


ENGINE_PROCESSES: Mapping[str, EngineProcesses] = {
    "sglang": EngineProcesses(
        re.compile(r"(sglang|sgl_diffusion)::"),
        ("sglang.launch_server", "sglang.cli.main"),
        "sglang",
        30000,
    ),
    "vllm": EngineProcesses(
        re.compile(r"[\w.-]+::(EngineCore|Worker|APIServer|DPCoordinator|DPSupervisor)"),
        ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"),
        "vllm",
        8000,
    ),
    "embedded": EngineProcesses(re.compile(r"(?!)"), ("changeover.engines.embedded",), None, 8000),
}


def engine_of(command: Sequence[str]) -> str | None:
    """The engine that a command line or title looks like, or None."""
    if not command:
        return None
    module, words = _started_as(command)
    for kind, shown in ENGINE_PROCESSES.items():
        if shown.title.match(command[0]) or module in shown.modules:
            return kind
        if words and shown.program is not None and words[0] == shown.program and words[1:2] == ["serve"]:
            return kind
    return None


def is_tracker(command: Sequence[str]) -> bool:
    """multiprocessing's resource tracker: ``python -c 'from multiprocessing.resource_tracker import main;main(N)'``."""
    return any(TRACKER_MODULE in word for word in command)


def http_port(engine: str, command: Sequence[str]) -> int:
    """The port that the launcher's command line asks for, or the engine's default."""
    for at, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name == "--port":
            given = value if equals else command[at + 1] if at + 1 < len(command) else ""
            if given.isdigit():
                return int(given)
    return ENGINE_PROCESSES[engine].port


def _started_as(command: Sequence[str]) -> tuple[str | None, list[str]]:
    """The module of ``python -m MODULE``, and the program's name with its arguments."""
    program = PurePosixPath(command[0]).name
    if not _PYTHON.match(program):
        return None, [program, *command[1:]]
    at = 1
    while at < len(command):
        word = command[at]
        if word == "-m":
            return (command[at + 1] if at + 1 < len(command) else None), []
        if word == "-c" or not word.startswith("-"):
            break
        at += 2 if word in _TAKES_A_VALUE else 1
    if at >= len(command) or command[at].startswith("-"):
        return None, []
    return None, [PurePosixPath(command[at]).name, *command[at + 1 :]]
