"""Waiting for a server by watching it work. A long load is shown, a dead server noticed, a stalled one
reported.

Fixed deadlines kill healthy loads (vllm #35547, llama-swap #92, ollama #6031): what counts is whether
anything moves, namely bytes read, CPU time of the server's processes, bytes in its log, its GPU memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from changeover.engines.protocol import Engine, ServerCommand, generate_one_token
from changeover.engines.stacks import dump_stacks
from changeover.engines.stages import LOADING, LoadStage, LogStages
from changeover.machine import http
from changeover.machine.processes import TICKS_PER_S, ProcessFacts
from changeover.machine.progress import Progress, ProgressSink, ignore_progress
from changeover.machine.protocol import Machine
from changeover.teardown.launch import Owned

POLL_S = 0.5
FIRST_TOKEN_TIMEOUT_S = 120.0
GPU_TIMEOUT_S = 10.0
STALLED_CPU_SHARE = 0.02
"""A tree below this share of one core does nothing but poll; an idle Python process with threads is under 1
%.
"""

# What Python says last of an exception, behind whatever a logger puts before it.
_EXCEPTION_LINE = re.compile(r"(?:^|[\s:])(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt): \S")
_ERROR_LINE = re.compile(r"error|exception|cannot|failed|out of memory|killed|refused", re.IGNORECASE)
_LOG_TAIL_BYTES = 16_384


@dataclass(frozen=True)
class Pulse:
    """What the server had done at one moment, all its processes together; every figure only grows."""

    t_s: float
    read_bytes: int
    cpu_s: float
    log_bytes: int


class Outcome(StrEnum):
    READY = "ready"
    DIED = "died"
    STALLED = "stalled"


@dataclass(frozen=True)
class Readiness:
    """How the wait ended. ``reason`` says it for people; ``log_tail`` are the log's last lines; ``stacks`` those of a
    stalled server's processes.
    """

    outcome: Outcome
    seconds: float
    reason: str
    log_tail: str = ""
    stacks: str = ""

    @property
    def ready(self) -> bool:
        return self.outcome is Outcome.READY


def moved(before: Pulse, now: Pulse) -> bool:
    """Whether the server did anything between two looks."""
    worked_s = now.cpu_s - before.cpu_s
    return (
        now.read_bytes > before.read_bytes
        or now.log_bytes > before.log_bytes
        or worked_s > STALLED_CPU_SHARE * (now.t_s - before.t_s)
    )


def stage_progress(stage: LoadStage, first: Pulse, now: Pulse, checkpoint_bytes: int) -> Progress:
    """The stage that the log speaks of: bytes while weights are read, graphs while these are captured, else seconds."""
    if stage.name == LOADING:
        return loading_progress(first, now, checkpoint_bytes)
    seconds = round(now.t_s - first.t_s, 1)
    detail = {"cpu_s": round(now.cpu_s, 1), "seconds": seconds}
    if stage.done is not None:
        return Progress(stage.name, stage.done, stage.total, "graphs", detail)
    return Progress(stage.name, round(seconds), None, "s", {"cpu_s": round(now.cpu_s, 1)})


def loading_progress(first: Pulse, now: Pulse, checkpoint_bytes: int) -> Progress:
    """Bytes read against the checkpoint's size, with rate and time left.

    Reads of program files are in it too, so it may reach the total early; it is shown, never decided on.
    """
    seconds = now.t_s - first.t_s
    done = min(now.read_bytes, checkpoint_bytes)
    rate = now.read_bytes / seconds if seconds > 0 else 0.0
    eta_s = (checkpoint_bytes - done) / rate if rate > 0 else None
    return Progress(
        stage="loading",
        done=done,
        total=checkpoint_bytes,
        unit="bytes",
        detail={
            "bytes_per_s": round(rate),
            "eta_s": None if eta_s is None else round(eta_s, 1),
            "cpu_s": round(now.cpu_s, 1),
            "seconds": round(seconds, 1),
        },
    )


def error_line(log_tail: str) -> str:
    """The line that most likely says why: the last exception, else the last that speaks of an error, else the last.

    SGLang's own last words are that a child failed, and that it collects its diagnostics.
    """
    lines = [line.strip() for line in log_tail.splitlines() if line.strip()]
    for pattern in (_EXCEPTION_LINE, _ERROR_LINE):
        for line in reversed(lines):
            if pattern.search(line):
                return line
    return lines[-1] if lines else "(the log is empty)"


def wait_ready(
    machine: Machine,
    owned: Owned,
    engine: Engine,
    command: ServerCommand,
    *,
    checkpoint_bytes: int,
    stall_s: float,
    on_progress: ProgressSink = ignore_progress,
) -> Readiness:
    """Wait until the server has generated a token, has died, or has not moved for ``stall_s``.

    Never ends because of the time alone while the server works. ``on_progress`` is called at every look and
    may raise to end the wait. Death of the leader is noticed within a second. GPU memory is asked for only in a
    silence, halfway and at its end: each question is a child that enters the driver.
    """
    clock = machine.clock
    first = last_move = _pulse(machine, owned)
    stages = LogStages(owned.log)
    gpu_mib_halfway: float | None = None
    while True:
        now = _pulse(machine, owned)
        seconds = now.t_s - first.t_s
        if not _alive(machine, owned):
            tail = _tail(owned.log)
            reason = f"it ended with status {owned.exit_code()} after {seconds:.1f} s: {error_line(tail)}"
            return Readiness(Outcome.DIED, seconds, reason, tail)
        if engine.is_ready(command.url):
            problem = _first_token_problem(command.url)
            seconds = clock.monotonic() - first.t_s
            if problem is None:
                return Readiness(Outcome.READY, seconds, "it generated a token")
            if _alive(machine, owned):
                return Readiness(
                    Outcome.STALLED,
                    seconds,
                    f"it says that it serves, but generated no token: {problem}",
                    _tail(owned.log),
                    dump_stacks(_session(machine, owned)),
                )
            continue
        still_s = now.t_s - last_move.t_s
        if moved(last_move, now):
            last_move, gpu_mib_halfway = now, None
        elif gpu_mib_halfway is None and still_s >= stall_s / 2:
            gpu_mib_halfway = _gpu_mib(machine, owned)
        elif still_s >= stall_s and _gpu_mib(machine, owned) != gpu_mib_halfway:
            last_move, gpu_mib_halfway = now, None
        elif still_s >= stall_s:
            tail = _tail(owned.log)
            reason = (
                f"nothing moved for {still_s:.0f} s (no byte read, no CPU time, no log line, no GPU memory) after "
                f"{seconds:.0f} s; last log line: {error_line(tail)}"
            )
            return Readiness(Outcome.STALLED, seconds, reason, tail, dump_stacks(_session(machine, owned)))
        on_progress(stage_progress(stages.look(), first, now, checkpoint_bytes))
        clock.sleep(POLL_S)


def _first_token_problem(url: str) -> str | None:
    try:
        generate_one_token(url, timeout_s=FIRST_TOKEN_TIMEOUT_S)
    except (OSError, http.HttpError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _alive(machine: Machine, owned: Owned) -> bool:
    facts = machine.process(owned.pid)
    return facts is not None and facts.identity == owned.identity and facts.alive


def _pulse(machine: Machine, owned: Owned) -> Pulse:
    """Over the server's session: its leader and everything that did not leave it."""
    ticks, read_bytes = 0, 0
    for facts in _session(machine, owned):
        ticks += facts.cpu_ticks
        read_bytes += _bytes_read(facts.pid)
    try:
        log_bytes = owned.log.stat().st_size
    except FileNotFoundError:
        log_bytes = 0
    return Pulse(machine.clock.monotonic(), read_bytes, ticks / TICKS_PER_S, log_bytes)


def _session(machine: Machine, owned: Owned) -> list[ProcessFacts]:
    return [facts for facts in machine.processes().values() if facts.sid == owned.sid]


def _gpu_mib(machine: Machine, owned: Owned) -> float:
    """What the drivers list for the server's processes; 0 where there is no GPU, or none is listed."""
    ours = {facts.pid for facts in _session(machine, owned)}
    reading = machine.gpus(GPU_TIMEOUT_S)
    return sum(one.used_mib or 0.0 for gpu in reading.gpus for one in gpu.processes if one.pid in ours)


def _bytes_read(pid: int) -> int:
    """``rchar`` counts read(2) also from the page cache; ``read_bytes`` counts the disk, mapped files
    included.
    """
    try:
        text = Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return 0
    values = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    return max(int(values.get("rchar", 0)), int(values.get("read_bytes", 0)))


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
