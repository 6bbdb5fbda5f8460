"""A run on the terminal: a line for each thing that happened, and a live line for the one that goes on.

Without a terminal (a log file, a pipe, CI) there are plain lines only, progress among them at most every ten seconds.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

from changeover.cli.output import is_terminal
from changeover.cli.progress import PLAIN_PROGRESS_PERIOD_S, LiveBar, progress_text


class SeenEvent(Protocol):
    """What a view needs of a journal event."""

    @property
    def t_wall(self) -> float: ...
    @property
    def event(self) -> str: ...
    @property
    def data(self) -> dict[str, Any]: ...


def describe(event: SeenEvent) -> str | None:
    """The event as a line for people, or None for what only the journal needs."""
    data = event.data
    where = data.get("phase", "")
    match event.event:
        case "run.started":
            return f"run {data['run_id']}"
        case "run.resumed":
            return "resumed"
        case "run.done":
            return f"done in {seconds(data['seconds'])}"
        case "run.failed" | "run.interrupted":
            return f"{event.event[4:]}: {data['reason']}"
        case "phase.started":
            return f"phase {where}"
        case "phase.failed":
            return f"  failed: {data['reason']}"
        case "server.starting":
            return f"  server: {data['engine']}, profile {data['profile']}, {data['url']}{_in_memory(data)}"
        case "server.ready":
            exposed = data.get("exposed") or []
            ports = ", ".join(map(str, exposed))
            warning = f"; it listens on all interfaces at {ports}: whoever reaches this machine reaches it"
            return f"  ready after {seconds(data['seconds'])}" + (warning if exposed else "")
        case "job.started":
            return f"  {data['job']}: started"
        case "job.done":
            summary = summarise(data["kind"], data["result"])
            return f"  {data['job']}: done in {seconds(data['seconds'])}" + (
                f" - {summary}" if summary else ""
            )
        case "job.failed":
            return f"  {data['job']}: FAILED: {data['reason']}"
        case "ahead.checked":
            return "\n".join(f"  phase {data['next']} comes next: {one}" for one in data["problems"]) or None
        case "ahead.done":
            return _read_ahead(data)
        case "changeover.signal":
            return f"  {data['signal']} to pid {data['pid']} ({data['proof']})"
        case "changeover.cleared":
            clearance = data["clearance"]
            lines = [f"  clearance after {where}: {clearance['verdict']} in {seconds(clearance['seconds'])}"]
            lines += [
                f"    {item['item']}: {item['seen']}"
                + ("" if item["verdict"] == "clean" else f" ({item['verdict']})")
                for item in clearance["evidence"]
            ]
            return "\n".join(lines)
        case _:
            return None


def _in_memory(data: dict[str, Any]) -> str:
    cached, total = data.get("cached_bytes"), data.get("weights_bytes")
    return f"; {cached / total:.0%} of its weights in memory" if cached is not None and total else ""


def _read_ahead(data: dict[str, Any]) -> str | None:
    cached, total = data.get("cached_bytes"), data.get("bytes")
    if cached is None or not total:
        return None
    return f"  for the next server: {cached / total:.0%} of {total / 2**30:,.1f} GiB of weights in memory"


def summarise(kind: str, result: dict[str, Any]) -> str:
    """The figure that a job is run for, in a few words; empty where a result does not hold it."""
    try:
        match kind:
            case "compare":
                return str(result["sentence"])
            case "train":
                length = result["evaluation"]["acceptance_length"]
                return (
                    f"{result['steps']} steps; simulated acceptance length {length:.2f} on held-out samples"
                )
            case "collect":
                return f"{result['samples']} samples, {result['tokens']:,} tokens"
            case "bench":
                rates = [
                    f"{level['summary']['output_tok_s']['mean']:.1f} tok/s at {level['concurrency']}"
                    for level in result["levels"]
                ]
                lengths = [
                    level["summary"]["acceptance"]["length"]
                    for level in result["levels"]
                    if level["summary"]["acceptance"]
                ]
                accepted = [f"acceptance length {sum(lengths) / len(lengths):.2f}"] if lengths else []
                return ", ".join(rates + accepted)
    except (KeyError, TypeError):
        pass
    return ""


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{int(value // 60)} min {int(value % 60)} s"


class PlainView:
    """Lines with the time since the start, on stderr."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._last_progress = float("-inf")

    def __call__(self, event: SeenEvent) -> None:
        self._start = event.t_wall if self._start is None else self._start
        text = describe(event)
        if text is None and event.event in ("job.progress", "server.loading"):
            if event.t_wall - self._last_progress < PLAIN_PROGRESS_PERIOD_S:
                return
            self._last_progress = event.t_wall
            text = "    " + progress_text(event.data.get("job", "loading"), event.data["progress"])
        if text is not None:
            self._write(event.t_wall - self._start, text)

    def _write(self, since_s: float, text: str) -> None:
        stamp = f"{int(since_s // 60):3d}:{int(since_s % 60):02d}"
        for line in text.splitlines():
            print(f"{stamp} {line}", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class RichView:
    """The same lines, with a bar, rate and time left for what goes on."""

    def __init__(self) -> None:
        self._bar = LiveBar()

    def __call__(self, event: SeenEvent) -> None:
        if event.event in ("job.progress", "server.loading"):
            self._bar.show(event.data.get("job", "loading"), event.data["progress"])
            return
        if event.event == "changeover.stage":
            stage = {"stage": event.data["stage"], "done": 0, "total": None, "unit": "", "detail": {}}
            self._bar.show("changeover", stage)
            return
        text = describe(event)
        if text is not None:
            self._bar.print(text, style=_style(event))

    def close(self) -> None:
        self._bar.close()


def _style(event: SeenEvent) -> str:
    if event.event in ("run.failed", "phase.failed", "job.failed"):
        return "bold red"
    if event.event in ("phase.started", "run.done"):
        return "bold"
    if event.event == "changeover.cleared":
        return "green" if event.data["clearance"]["verdict"] == "clean" else "bold red"
    return ""


def make_view() -> PlainView | RichView:
    """What suits the terminal that we have."""
    return RichView() if is_terminal() else PlainView()
