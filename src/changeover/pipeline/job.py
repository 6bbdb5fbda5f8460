"""One job as a process of its own: ``python -m changeover.pipeline.job FOLDER``.

It reads ``job.json``, appends to ``progress.jsonl``, and writes ``result.json`` by rename when the job has
succeeded. A failure is said in ``failure.json``; the exit status is 0 only with a result.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from changeover.machine.durable import replace_json
from changeover.machine.errors import ChangeoverError
from changeover.machine.progress import Progress
from changeover.pipeline.work import WORK

# the runner looks about five times a second; more lines would only be read and dropped
_PERIOD_S = 0.2


class ProgressFile:
    """Appends progress, the newest line at most every 0.2 s and every change of stage."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._last_s = float("-inf")
        self._stage = ""

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        complete = progress.total is not None and progress.done >= progress.total
        if progress.stage == self._stage and now - self._last_s < _PERIOD_S and not complete:
            return
        self._last_s, self._stage = now, progress.stage
        self._file.write(json.dumps(progress.to_json()) + "\n")
        self._file.flush()


def run_job(folder: Path) -> int:
    """Do the job of a folder; returns the exit status."""
    request = json.loads((folder / "job.json").read_text())
    for stale in ("result.json", "failure.json"):
        (folder / stale).unlink(missing_ok=True)
    try:
        result = WORK[request["kind"]](request["params"], ProgressFile(folder / "progress.jsonl"))
        replace_json(folder / "result.json", result)
    except ChangeoverError as error:
        return _fail(folder, error.to_json())
    except Exception as error:  # noqa: BLE001 - whatever it was, the runner is told and the log has the traceback
        traceback.print_exc()
        return _fail(
            folder,
            {
                "error": type(error).__name__,
                "expected": f"the {request['kind']} job to end with a result",
                "seen": f"{type(error).__name__}: {error}",
                "todo": f"The traceback is in {folder / 'log'}.",
            },
        )
    return 0


def _fail(folder: Path, failure: dict[str, Any]) -> int:
    print(json.dumps(failure), file=sys.stderr, flush=True)
    replace_json(folder / "failure.json", failure)
    return 1


if __name__ == "__main__":
    sys.exit(run_job(Path(sys.argv[1])))
