"""``changeover status``, ``attach`` and ``stop``: where a run is, following it, ending it cleanly."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import typer

from changeover.cli.options import RUNS_DIR
from changeover.cli.output import print_json, say
from changeover.machine.errors import ChangeoverError

RUN = typer.Argument(None, help="A run's id or folder; default: the newest.")
_LOOK_S = 0.3
_NOT_CLEAN = (3, 4, 5, 6)  # of a run's exit codes, those that say that the machine is not proven clean


def status(
    run: str = RUN,
    runs_dir: Path = RUNS_DIR,
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Say where a run is."""
    from changeover.pipeline.folder import find_run

    facts = _facts(find_run(run, runs_dir))
    if as_json:
        print_json(facts)
        return
    typer.echo(f"{facts['run_id']}: {facts['where']}")
    for phase in facts["phases"]:
        typer.echo(f"  {phase['name']:<16} {phase['state']:<10} {', '.join(phase['jobs_done'])}")
    if facts["reason"]:
        typer.echo(f"  {facts['reason']}")


def attach(run: str = RUN, runs_dir: Path = RUNS_DIR) -> None:
    """Follow a run until it ends; leaving (Ctrl-C) does not touch it. Exits as the run does."""
    from changeover.cli.terminal import make_view
    from changeover.pipeline.folder import find_run
    from changeover.pipeline.journal import read_events
    from changeover.pipeline.state import read_state

    folder = find_run(run, runs_dir)
    view = make_view()
    shown = 0
    try:
        while True:
            alive = folder.runner_pid() is not None
            events = read_events(folder.journal)
            for event in events[shown:]:
                view(event)
            shown = len(events)
            if not alive:
                break
            time.sleep(_LOOK_S)
    finally:
        view.close()
    exit_code = read_state(events).exit_code
    if exit_code is None:
        say(f"the run was cut off; go on with: changeover run --resume {shlex.quote(str(folder.path))}")
        sys.exit(6)
    sys.exit(exit_code)


def stop(
    run: str = RUN,
    runs_dir: Path = RUNS_DIR,
    timeout_s: float = typer.Option(
        660.0, "--timeout", help="Seconds to wait for the machine to be cleared."
    ),
) -> None:
    """End a run: it clears the machine and can be resumed. Exits with 3 to 6 if it is not clean."""
    from changeover.pipeline.folder import find_run

    folder = find_run(run, runs_dir)
    pid = folder.runner_pid()
    if pid is None:
        say(
            f"nobody works on {folder.run_id}; `changeover clear --run {shlex.quote(str(folder.path))}` "
            "clears what it may have left"
        )
        return
    # the pidfd is opened first and the lock read again: it is held by that very process, or the pid was recycled
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        handle = None
    if handle is None or folder.runner_pid() != pid:
        say(f"{folder.run_id} has just ended")
        return
    signal.pidfd_send_signal(handle, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while folder.runner_pid() is not None:
        if time.monotonic() >= deadline:
            raise ChangeoverError(
                expected=f"run {folder.run_id} to clear the machine within {timeout_s:.0f} s",
                seen=f"pid {pid} is still at it",
                todo=f"Follow it with `changeover attach {folder.run_id}`.",
            )
        time.sleep(_LOOK_S)
    facts = _facts(folder)
    say(f"{facts['run_id']}: {facts['where']}; {facts['reason']}")
    cut_off = facts["exit_code"] is None
    sys.exit(6 if cut_off else facts["exit_code"] if facts["exit_code"] in _NOT_CLEAN else 0)


def _facts(folder: Any) -> dict[str, Any]:
    from changeover.pipeline.journal import read_events
    from changeover.pipeline.state import RunVerdict, read_state

    state = read_state(read_events(folder.journal))
    pid = folder.runner_pid()
    where = state.verdict.value
    if state.verdict is RunVerdict.OPEN:
        where = f"running (pid {pid})" if pid is not None else "cut off (resume it, or clear it)"
    phases = [
        {
            "name": phase.name,
            "state": _phase_state(phase, runner_alive=pid is not None),
            "jobs_done": sorted(phase.jobs),
        }
        for phase in state.phases.values()
    ]
    return {
        "run_id": state.run_id or folder.run_id,
        "run_dir": str(folder.path),
        "verdict": state.verdict.value,
        "where": where,
        "reason": state.reason,
        "exit_code": state.exit_code,
        "pid": pid,
        "phases": phases,
    }


def _phase_state(phase: Any, *, runner_alive: bool) -> str:
    if phase.done:
        return "done"
    if (
        phase.unclear
    ):  # started, and the machine not proven clean since: normal only while somebody works on it
        return "running" if runner_alive else "unclear"
    return "not done"
