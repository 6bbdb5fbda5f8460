"""The system's own OpenSSH, with the user's own configuration: one connection, shared by all that is asked over it.

What runs there is a constant; every parameter travels on stdin. So nothing that a user types is ever part of a remote
shell's line, whichever shell that is (``pkill -f`` over SSH matches its own shell: prime-rl PR #2331).
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from changeover.machine.clock import Clock, SystemClock
from changeover.machine.errors import ChangeoverError, InvalidInput

REMOTE_COMMAND = 'exec python3 -c "import sys;d=sys.stdin.buffer;exec(d.read(int(d.readline())))"'
"""Runs the Python text that comes first on stdin, its length before it; plain in sh, bash, zsh, fish and csh alike."""

_ALIVE_S, _ALIVE_COUNT, _CONNECT_S = 5, 3, 15
_TODO = (
    ("Host key verification failed", "Check whose key that is, then connect once by hand: ssh {host}"),
    (
        "Permission denied",
        "Load your key into the agent, or name it in ssh's configuration; ssh {host} must not ask.",
    ),
    ("Could not resolve hostname", "Check the name; an alias needs an entry in ssh's configuration."),
    (
        "not found",
        "Python 3.10 or newer must be on the PATH of a command over ssh there: ssh {host} python3 -V",
    ),
)


class HostUnreachable(ChangeoverError):  # noqa: N818
    """No answer from the box: nothing is known of it, and nothing was done there."""

    exit_code = 6


class LinkLost(Exception):  # noqa: N818
    """The connection ended, or fell silent, in the middle."""


class Silence(LinkLost):
    """Nothing was heard for too long; the connection has not ended."""


class Session:
    """One command on the box; lines in, lines out."""

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes], clock: Clock) -> None:
        self._process = process
        self._errors = errors
        self._clock = clock
        self._pending = b""

    def send(self, data: bytes) -> None:
        """Raises LinkLost where the other end is gone."""
        assert self._process.stdin is not None  # opened as a pipe
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError as error:
            raise LinkLost(str(error)) from error

    def line(self, timeout_s: float) -> bytes | None:
        """The next line; None at the end of the output. Raises LinkLost where nothing comes in that time."""
        assert self._process.stdout is not None  # opened as a pipe
        until_s = self._clock.monotonic() + timeout_s
        while b"\n" not in self._pending:
            left_s = until_s - self._clock.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                raise Silence(f"nothing heard for {timeout_s:.0f} s")
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                return None
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def ended(self) -> tuple[int, str]:
        """Exit status and what ssh or the remote shell said on stderr."""
        status = self._process.wait(timeout=_CONNECT_S)
        self._errors.seek(0)
        return status, self._errors.read().decode(errors="replace").strip()

    def close(self) -> None:
        self._process.kill()  # our own child, the ssh client: what it started there goes on
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._errors.close()


class Ssh:
    """A host; a context manager, since the shared connection is ended with it."""

    def __init__(self, host: str, *, config: Path | None = None, clock: Clock | None = None) -> None:
        """``host`` as for ssh: a name, ``user@name``, or an alias; ``config`` as for ``ssh -F``.

        Raises InvalidInput for anything else.
        """
        if not host or host.startswith("-") or any(character.isspace() for character in host):
            raise InvalidInput(
                expected="a host as ssh takes it: NAME, USER@NAME or an alias of its configuration",
                seen=repr(host),
                todo="Give options in ssh's configuration, not in the name.",
            )
        if shutil.which("ssh") is None:
            raise InvalidInput(
                expected="OpenSSH's client on this machine",
                seen="no ssh on the PATH",
                todo="Install openssh-client.",
            )
        self.host = host
        self._clock = clock or SystemClock()
        self._folder = tempfile.mkdtemp(prefix="changeover-")  # 0700, and short: sun_path holds 107 bytes
        self._options = ["-F", str(config)] if config is not None else []

    def __enter__(self) -> Ssh:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                [*self._argv(), "-O", "exit", "--", self.host],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=5,
            )
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextlib.contextmanager
    def session(self) -> Iterator[Session]:
        """Start the constant command on the box."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the session
        process = subprocess.Popen(
            [*self._argv(), "--", self.host, REMOTE_COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C is ours to handle: the box goes on
        )
        session = Session(process, errors, self._clock)
        try:
            yield session
        finally:
            session.close()

    def unreachable(self, status: int, said: str) -> HostUnreachable:
        """In words, with ssh's own last line."""
        last = said.splitlines()[-1] if said else f"exit {status}"
        todo = next((todo for words, todo in _TODO if words in said), "Try by hand: ssh {host} python3 -V")
        return HostUnreachable(
            expected=f"Python to answer on {self.host} over ssh",
            seen=last[:300],
            todo=todo.format(host=self.host),
        )

    def _argv(self) -> list[str]:
        settings = {
            "BatchMode": "yes",
            "ControlMaster": "auto",
            "ControlPath": f"{self._folder}/%C",
            "ControlPersist": "30",
            "ServerAliveInterval": str(_ALIVE_S),
            "ServerAliveCountMax": str(_ALIVE_COUNT),
            "ConnectTimeout": str(_CONNECT_S),
        }
        given = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", "-T", *self._options, *given]
