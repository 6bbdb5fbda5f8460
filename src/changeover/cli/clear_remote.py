"""``changeover clear --host``: the same on a box over SSH, shown here while it happens there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from changeover.cli.output import print_json, say
from changeover.machine.errors import InvalidInput

if TYPE_CHECKING:
    from changeover.machine.record import Event
    from changeover.teardown.adoption import Wish
    from changeover.teardown.budgets import Budgets
    from changeover.teardown.clearance import Clearance
    from changeover.teardown.footprint import StopPolicy


@dataclass(frozen=True)
class Asked:
    """What was asked for on the command line. ``token`` travels on stdin only."""

    wish: Wish
    budgets: Budgets
    stop: StopPolicy
    token: str | None


def clear(
    host: str, config: Path | None, asked: Asked, *, yes: bool, dry_run: bool, as_json: bool
) -> NoReturn:
    """Find, show, ask, and follow it to its clearance; Ctrl-C ends the following, not the teardown."""
    from changeover.cli.clear import expect_consent
    from changeover.machine.ssh import Ssh
    from changeover.teardown.remote import Box

    with Ssh(host, config=config) as ssh:
        box = Box(ssh)
        trees = box.find(asked.wish)
        for tree in trees:
            say(tree.to_text())
        if not trees:
            say(f"no process of {asked.wish.engine} on {host}")
        if dry_run:
            if as_json:
                print_json({"host": host, "trees": [tree.to_json() for tree in trees]})
            raise typer.Exit
        willing = expect_consent(trees, yes=yes)
        begun: list[str] = []

        def started(identity: str) -> None:
            begun.append(identity)
            say(f"begun on {host}; to come back to it: changeover clear --host {host} --attach {identity}")

        try:
            clearance = box.clear(
                asked.wish,
                willing,
                budgets=asked.budgets,
                stop=asked.stop,
                token=asked.token,
                on_started=started,
                on_event=_show,
            )
        except KeyboardInterrupt:
            say(f"it goes on there: changeover clear --host {host} --attach {''.join(begun) or 'ID'}")
            raise typer.Exit(130) from None
    _end(host, "".join(begun), clearance, as_json=as_json)


def attach(host: str | None, config: Path | None, identity: str, *, as_json: bool) -> NoReturn:
    """From the first line on: what was shown before is shown again, since this may be another terminal."""
    from changeover.machine.ssh import Ssh
    from changeover.teardown.remote import Box

    if host is None:
        raise InvalidInput(
            expected="--host with --attach",
            seen="no host",
            todo="A clear of this machine runs in the foreground; its audit is in ~/.local/state/changeover/audit.",
        )
    with Ssh(host, config=config) as ssh:
        clearance = Box(ssh).attach(identity, 0, _show)
    _end(host, identity, clearance, as_json=as_json)


def _show(event: Event) -> None:
    if event.event == "clear.stage":
        detail = event.data["detail"]
        say(f"  {event.data['seconds']:8.2f} s   {event.data['stage']} {event.data['outcome']} ({detail})")
    if event.event == "clear.signal":
        say(
            f"  {event.data['signal']} to pid {event.data['pid']} ({event.data['comm']}): {event.data['proof']}"
        )


def _end(host: str, identity: str, clearance: Clearance, *, as_json: bool) -> NoReturn:
    if as_json:
        print_json({**clearance.to_json(), "host": host, "audit": identity})
    say(clearance.to_text())
    raise typer.Exit(clearance.exit_code)
