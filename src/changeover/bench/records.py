"""The files of a benchmark, written whole or not at all: one line a request, and the result.

Strict JSON: a number that JSON cannot hold (NaN, Infinity) is an error here, never a line that jq refuses
(sglang#12389).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from changeover.bench.answer import Answer
from changeover.bench.metrics import Repeat, time_answer
from changeover.machine.durable import replace_json
from changeover.machine.errors import InvalidInput


class RequestRecords:
    """``requests.jsonl`` in a folder: lines go to a temporary file that is renamed when all has gone well."""

    NAME = "requests.jsonl"

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._partial = self._folder / f"{self.NAME}.partial"
            self._file = self._partial.open("w", encoding="utf-8")
        return self

    def add(self, repeat: Repeat) -> None:
        """The lines of one repeat; they are on the disk when this returns."""
        if self._folder is None:
            return
        for answer in repeat.answers:
            self._file.write(json.dumps(record(repeat, answer), allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is None:
            return
        self._file.close()
        if kind is None:
            self._partial.replace(self._folder / self.NAME)


def record(repeat: Repeat, answer: Answer) -> dict[str, Any]:
    """One line of requests.jsonl; times in seconds, ``*_at_s`` since the start of the repeat."""
    line: dict[str, Any] = {
        "concurrency": repeat.concurrency,
        "repeat": repeat.repeat,
        "index": answer.index,
        "prompt_id": answer.prompt_id,
        "ok": answer.failure is None,
        "planned_at_s": round(answer.planned_s - repeat.started_s, 6),
        "ended_at_s": round(answer.ended_s - repeat.started_s, 6),
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
        "cached_tokens": answer.cached_tokens,
        "speculation": None if answer.speculation is None else asdict(answer.speculation),
        "chunk_at_s": [round(arrival.at_s - repeat.started_s, 6) for arrival in answer.arrivals],
        "chunk_output_tokens": [arrival.output_tokens for arrival in answer.arrivals],
        "text": answer.text,
    }
    if answer.failure is not None:
        return {**line, "reason": answer.failure.reason, "detail": answer.failure.detail}
    timing = time_answer(answer)
    return {
        **line,
        "ttft_s": timing.ttft_s,
        "tpot_s": timing.tpot_s,
        "e2e_s": timing.e2e_s,
        "sched_lag_s": timing.sched_lag_s,
        "first_chunk_tokens": timing.first_chunk_tokens,
        "missing": timing.missing,
    }


def write_result(result: dict[str, Any], path: Path) -> None:
    """The result as strict JSON, by temporary file and rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_json(path, result)


def read_result(path: Path) -> dict[str, Any]:
    """A result that ``changeover bench`` wrote.

    Raises:
        InvalidInput: no such file, not strict JSON, or not the result of a benchmark.
    """
    todo = "Give the result.json that `changeover bench --out DIR` wrote."
    try:
        result = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError) as error:
        raise InvalidInput(expected=f"a benchmark result in {path}", seen=str(error), todo=todo) from error
    if not isinstance(result, dict) or result.get("kind") != "bench":
        kind = result.get("kind") if isinstance(result, dict) else type(result).__name__
        raise InvalidInput(expected=f"a benchmark result in {path}", seen=f"kind {kind!r}", todo=todo)
    return result


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
