"""How progress looks, in runs and in single commands: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from changeover.cli.output import is_terminal, say

if TYPE_CHECKING:
    from changeover.machine.progress import Progress

PLAIN_PROGRESS_PERIOD_S = 10.0


class ProgressLine:
    """The progress of one command, as a sink and a context: ``with ProgressLine("train") as show: ...``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._bar = LiveBar() if is_terminal() else None
        self._last_s = float("-inf")

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, progress: Progress) -> None:
        if self._bar is not None:
            self._bar.show(self._name, progress.to_json())
        elif progress.done == progress.total or time.monotonic() - self._last_s >= PLAIN_PROGRESS_PERIOD_S:
            self._last_s = time.monotonic()
            say(progress_text(self._name, progress.to_json()))


class LiveBar:
    """One bar at the foot of the terminal, on stderr; lines printed meanwhile stand above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True, highlight=False)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task: Any = None
        self._label = ""
        self._bars.start()

    def show(self, name: str, progress: dict[str, Any]) -> None:
        """The newest observation of ``name``; another name or stage starts a bar of its own."""
        label = f"{name}/{progress['stage']}"
        if label != self._label:
            self._end()
            self._task = self._bars.add_task("", total=progress.get("total"))
            self._label = label
        self._bars.update(
            self._task,
            description=progress_text(name, progress),
            completed=progress["done"],
            total=progress.get("total"),
        )

    def print(self, text: str, *, style: str = "") -> None:
        """A line that stays; the bar before it has ended."""
        self._end()
        self._console.print(text, markup=False, style=style)

    def close(self) -> None:
        self._end()
        self._bars.stop()

    def _end(self) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task, self._label = None, ""


def progress_text(name: str, progress: dict[str, Any]) -> str:
    """``collect: answering 120 of 400 samples, 96.0 tokens a second, 0:41 left``."""
    unit, total = progress["unit"], progress.get("total")
    amount = _figure(progress["done"], unit) + (f" of {_figure(total, unit)}" if total else "")
    detail = dict(progress.get("detail", {}))
    left_s = detail.pop("eta_s", None)
    stage = "" if progress["stage"] == name else f" {progress['stage']},"
    parts = [f"{name}:{stage} {amount} {'' if unit == 'bytes' else unit}".rstrip()]
    parts += [_detail(key, value) for key, value in detail.items() if value not in (None, 0)]
    if isinstance(left_s, int | float) and left_s > 0:
        parts.append(f"{int(left_s // 60)}:{int(left_s % 60):02d} left")
    return ", ".join(parts)


def _detail(key: str, value: float | int | str) -> str:
    if key.endswith("_per_s"):
        unit = key.removesuffix("_per_s")
        return f"{_figure(value, unit)}{'' if unit == 'bytes' else ' ' + unit} a second"
    return f"{key.replace('_', ' ')} {_figure(value, key)}"


def _figure(value: float | int | str, unit: str) -> str:
    if isinstance(value, str):
        return value
    if unit == "bytes":
        return f"{value / 2**20:,.1f} MiB" if value < 2**30 else f"{value / 2**30:,.2f} GiB"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
