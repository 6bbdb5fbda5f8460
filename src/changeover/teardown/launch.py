"""Start a process so that it can be proven ours later, by a new Changeover too."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from changeover.machine.errors import InvalidInput
from changeover.machine.processes import COOKIE_VARIABLE, ProcessIdentity
from changeover.machine.protocol import Machine
from changeover.teardown.footprint import Drain, StopPolicy, Target


@dataclass(frozen=True)
class Owned:
    """A process that we started, the leader of a session of its own (``sid`` = its pid)."""

    machine: Machine = field(repr=False, compare=False)
    identity: ProcessIdentity
    log: Path
    cookie: str = field(repr=False)
    cgroup: str | None = None

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def sid(self) -> int:
        return self.identity.pid

    def exit_code(self) -> int | None:
        """None while it runs, negative for a signal. Looks without reaping: the session stays provably
        ours.
        """
        return self.machine.exit_code(self.identity)

    def target(
        self,
        name: str,
        *,
        ports: tuple[int, ...] = (),
        files: tuple[str, ...] = (),
        drain: Drain | None = None,
        stop: StopPolicy = StopPolicy.GRACEFUL,
    ) -> Target:
        """What must be gone after the phase; keep it up to date with ``leftovers.observe``."""
        return Target(
            name=name,
            cookie=self.cookie,
            leader=self.identity,
            sid=self.sid,
            members=frozenset({self.identity}),
            ports=ports,
            files=files,
            drain=drain,
            cgroup=self.cgroup,
            stop=stop,
        )


def cgroup_name(cookie: str) -> str:
    """The name of the cgroup for what carries this cookie; it tells nothing of the secret."""
    return f"changeover-{hashlib.sha256(cookie.encode()).hexdigest()[:16]}"


def launch(
    machine: Machine,
    *,
    argv: list[str],
    env: Mapping[str, str],
    cwd: Path,
    log: Path,
    cookie: str,
    cgroup: str | None = None,
) -> Owned:
    """Start ``argv`` in its own session, and in ``cgroup`` (``machine.make_cgroup``) where there is one; ``env`` is
    added to our own environment.

    stdin is /dev/null; stdout and stderr are appended to ``log``. ``SPT_NOENV=1`` keeps ``setproctitle`` from
    overwriting the environment, and with it the cookie (py-setproctitle's README). Raises InvalidInput
    where the program cannot be started.
    """
    marked = {**os.environ, **env, "SPT_NOENV": "1", COOKIE_VARIABLE: cookie}
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        identity = machine.spawn(argv, env=marked, cwd=cwd, log=log, cgroup=cgroup)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise InvalidInput(
            expected=f"a program that can be started in {cwd}: {argv[0]}",
            seen=f"{type(error).__name__}: {error}",
            todo="Check the path, that the file is executable, and that the working folder exists.",
        ) from error
    return Owned(machine=machine, identity=identity, log=log, cookie=cookie, cgroup=cgroup)
