"""What runs on the box at the other end of an SSH connection, from the zipapp of :mod:`changeover.teardown.bundle`.

It answers one request. A teardown is done by a process of its own session, which outlives the link, and writes the
audit; the answer is that audit's lines, from any offset on, so that whoever was cut off comes back and misses none.

    python3 changeover.pyz check      for use by hand, on the box itself
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from changeover.machine.clock import SystemClock
from changeover.machine.errors import ChangeoverError, InvalidInput
from changeover.machine.local import LocalMachine
from changeover.machine.processes import read_boot_id, read_process
from changeover.machine.record import decode_event
from changeover.teardown.adoption import Tree, Wish, find_trees
from changeover.teardown.audit import CLEARED, Audit, audit_folder, new_audit_id
from changeover.teardown.budgets import Budgets
from changeover.teardown.check import check_machine
from changeover.teardown.clear_adopted import clear_adopted
from changeover.teardown.footprint import StopPolicy

MARK = "\x1echangeover "
"""Begins every line of ours: what a login script prints before them is not one."""
_BEAT_S, _LOOK_S = 2.0, 0.1
_START_LIMIT_S = 30.0

Say = Callable[[dict[str, Any]], None]


def say(answer: dict[str, Any]) -> None:
    """One answer on stdout; raises BrokenPipeError when nobody listens any more."""
    sys.stdout.write(MARK + json.dumps(answer) + "\n")
    sys.stdout.flush()


def serve(request: Mapping[str, Any], tell: Say = say) -> None:
    """Answer one request; whatever is wrong with it is an answer too."""
    try:
        match request["do"]:
            case "check":
                tell({"clearance": check_machine(LocalMachine()).to_json()})
            case "find":
                trees = find_trees(LocalMachine(), Wish.from_json(request["wish"]))
                tell({"trees": [tree.to_json() for tree in trees]})
            case "clear":
                identity = _start(request)
                tell({"started": identity})
                follow(identity, 0, tell)
            case "follow":
                follow(request["id"], request["offset"], tell)
            case other:
                raise InvalidInput(
                    expected="check, find, clear or follow",
                    seen=str(other),
                    todo="Use one version on both sides.",
                )
    except ChangeoverError as error:
        tell({"error": error.to_json()})


def follow(identity: str, offset: int, tell: Say) -> None:
    """The audit's lines from a byte offset on, each with the offset behind it, until the clearance or the worker's end.

    In silence a beat is told every two seconds, so that a dead link is noticed on both sides.
    """
    path = _path(identity)
    if not path.exists() and not _failure(path).exists():
        raise InvalidInput(
            expected=f"an audit {identity} on this machine",
            seen=f"none at {path}",
            todo="The id is printed when a clear begins; audits are of one user each.",
        )
    clock = SystemClock()
    spoke_s, worker_gone = clock.monotonic(), False
    while True:
        raw = path.read_bytes()[offset:] if path.exists() else b""
        whole = raw[: raw.rfind(b"\n") + 1]
        for line in whole.splitlines(keepends=True):
            offset += len(line)
            tell({"line": line.decode(), "offset": offset})
            spoke_s = clock.monotonic()
            event = decode_event(line)
            if event is not None and event.event == CLEARED:
                tell({"ended": True})
                return
        if not whole and worker_gone:
            failure = _failure(path)
            tell(json.loads(failure.read_text()) if failure.exists() else {"ended": False})
            return
        worker_gone = not _worker_lives(path)
        if clock.monotonic() > spoke_s + _BEAT_S:
            tell({"beat": offset})
            spoke_s = clock.monotonic()
        if not whole and not worker_gone:
            clock.sleep(_LOOK_S)


def work(identity: str, request: Mapping[str, Any]) -> None:
    """The teardown itself, in its own session; how it could not begin is left in a file beside the audit."""
    machine, path = LocalMachine(), _path(identity)
    audit = Audit(path, machine.clock)
    try:
        clear_adopted(
            machine,
            Wish.from_json(request["wish"]),
            [Tree.from_json(tree) for tree in request["trees"]],
            audit,
            budgets=Budgets(**request["budgets"]),
            stop=StopPolicy(request["stop"]),
            token=request.get("token"),
        )
    except ChangeoverError as error:
        _failure(path).write_text(json.dumps({"error": error.to_json()}))
    else:
        _tidy(path)
    finally:
        audit.close()


def _tidy(path: Path) -> None:
    """The clearance stands in the audit: who worked and what it printed (nothing) need not be kept beside it."""
    _pid_file(path).unlink(missing_ok=True)
    output = path.with_suffix(".out")
    if output.exists() and output.stat().st_size == 0:
        output.unlink()


def _start(request: Mapping[str, Any]) -> str:
    """Start the worker and wait until it has opened its audit; the request, which may hold a key, goes by a pipe."""
    identity = new_audit_id()
    path = _path(identity)
    with path.with_suffix(".out").open("ab") as sink:
        worker = subprocess.Popen(
            [sys.executable, *_how_we_run(), "work", identity],
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=sink,
            cwd="/",
            start_new_session=True,
        )
    _pid_file(path).write_text(f"{worker.pid} {_start_ticks(worker.pid)}")
    assert worker.stdin is not None  # opened as a pipe above
    worker.stdin.write(json.dumps(dict(request)).encode())
    worker.stdin.close()
    clock = SystemClock()
    until_s = clock.monotonic() + _START_LIMIT_S
    while not path.exists() and worker.poll() is None and clock.monotonic() < until_s:
        clock.sleep(_LOOK_S)
    if not path.exists() and not _failure(path).exists():
        raise ChangeoverError(
            expected="the teardown to begin",
            seen=path.with_suffix(".out").read_text(errors="replace")[-1000:] or f"exit {worker.poll()}",
            todo="Nothing was signalled. This is a defect of Changeover; please report it.",
        )
    return identity


def _how_we_run() -> list[str]:
    """From the zipapp, or, in tests and on this machine, from the installed package."""
    archive = Path(__file__).parents[2]
    return [str(archive)] if archive.is_file() else ["-m", "changeover.teardown.agent"]


def _worker_lives(path: Path) -> bool:
    """By pid and start time: a worker that ended is not mistaken for who has its pid now."""
    try:
        pid, start_ticks = map(int, _pid_file(path).read_text().split())
    except (OSError, ValueError):
        return False
    process = read_process(pid, read_boot_id())
    return process is not None and process.alive and process.identity.start_ticks == start_ticks


def _start_ticks(pid: int) -> int:
    process = read_process(pid, read_boot_id())
    return process.identity.start_ticks if process is not None else 0


def _path(identity: str) -> Path:
    if not all(character.isalnum() or character == "-" for character in identity):
        raise InvalidInput(expected="an audit's id", seen=identity[:60], todo="Copy it as it was printed.")
    return audit_folder() / f"{identity}.jsonl"


def _failure(path: Path) -> Path:
    return path.with_suffix(".failed")


def _pid_file(path: Path) -> Path:
    return path.with_suffix(".pid")


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["work"] and len(arguments) == 2:
        work(arguments[1], json.load(sys.stdin))
        return 0
    if arguments == ["check"]:
        clearance = check_machine(LocalMachine())
        print(clearance.to_text())
        return clearance.exit_code
    print(__doc__, file=sys.stderr)
    return 0 if arguments in (["--help"], ["-h"]) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
