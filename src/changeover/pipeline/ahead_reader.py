"""What can be done early for the next server, in a process of its own, started with a folder.

It reads the weights that the next server will load into the page cache, and has the engine's interpreter import the
server once, without a GPU: that reads its libraries and writes the bytecode that is missing. Then it looks every half
minute whether the weights are still there, since a collection writes more than a memory holds. It steps back behind
whatever else runs (nice 19), says what it has done in ``ahead.json``, and ends when it is told to.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from changeover.machine.durable import replace_json
from changeover.machine.page_cache import look, read_in, room_bytes

_PERIOD_S = 30.0
_IMPORT_TIMEOUT_S = 600.0
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}


def work_ahead(folder: Path) -> None:
    """Until somebody ends this process; ``request.json`` says of what: ``files``, ``module``, ``python``, ``env``."""
    request = json.loads((folder / "request.json").read_text())
    files = [Path(name) for name in request["files"]]
    done: dict[str, Any] = {"read_bytes": 0, "imported": None, "import_s": None}
    rehearsed = request["module"] is None
    while True:
        room = room_bytes()
        before = look(files)
        if before.cached_bytes is not None or not done["read_bytes"]:  # what cannot be looked at is read once
            done["read_bytes"] += read_in(files, room)
        done |= {"room_bytes": room, "found_bytes": before.cached_bytes, **_now(files)}
        replace_json(folder / "ahead.json", done)
        if not rehearsed:
            rehearsed, done = True, done | _rehearse(request, folder / "log")
            replace_json(folder / "ahead.json", done)
        time.sleep(_PERIOD_S)


def _now(files: list[Path]) -> dict[str, int | None]:
    seen = look(files)
    return {"bytes": seen.bytes, "cached_bytes": seen.cached_bytes}


def _rehearse(request: Mapping[str, Any], log_file: Path) -> dict[str, bool | float]:
    """Import and leave. A failure is the next server's to tell; here it only costs the time."""
    began_s = time.monotonic()
    with log_file.open("ab") as log:
        try:
            done = subprocess.run(
                [request["python"], "-c", f"import {request['module']}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **request["env"], **NO_GPU},
                timeout=_IMPORT_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            log.write(f"{error}\n".encode())
            return {"imported": False, "import_s": time.monotonic() - began_s}
    return {"imported": done.returncode == 0, "import_s": round(time.monotonic() - began_s, 3)}


if __name__ == "__main__":
    os.nice(19)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as an exception: what it imports in ends with it
    work_ahead(Path(sys.argv[1]))
