"""The processes of one phase: held from their start, observed while they run, handed to the changeover at the end."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from changeover.pipeline.context import PhaseFailed, RunContext
from changeover.pipeline.follow import Throttle, log_tail
from changeover.pipeline.journal import EventName
from changeover.teardown.footprint import Drain, StopPolicy, Target
from changeover.teardown.launch import Owned, cgroup_name, launch
from changeover.teardown.leftovers import held_by, observe

SERVER = "server"
AHEAD = "ahead"
"""Reads for the next server beside a job."""
_MEMBERS_PERIOD_S = 1.0
_ANY = ("0.0.0.0", "::")  # noqa: S104 - looked for, not bound
_SENDER_STOP_S = 30.0


@dataclass
class _Held:
    owned: Owned
    target: Target


class PhaseProcesses:
    """What a phase has started: its server under the name ``server``, its jobs under their own."""

    def __init__(self, context: RunContext, phase: str) -> None:
        self._context = context
        self._phase = phase
        self._held: dict[str, _Held] = {}
        self._members_due = Throttle(context.machine.clock.monotonic, _MEMBERS_PERIOD_S)

    def exposed_ports(self, name: str) -> list[int]:
        """On which ports its processes listen for the whole world (SGLang does on its NCCL port)."""
        machine, members = self._context.machine, self._held[name].target.members
        found = (machine.process(member.pid) for member in members)
        held = held_by(machine, [one for one in found if one is not None and one.identity in members])
        return sorted({one.port for one in held.listeners if one.address in _ANY})

    def start(
        self,
        name: str,
        *,
        argv: list[str],
        env: Mapping[str, str],
        folder: Path,
        ports: tuple[int, ...] = (),
        files: tuple[str, ...] = (),
        drain: Drain | None = None,
        cgroup: str | None = None,
        stop: StopPolicy = StopPolicy.GRACEFUL,
    ) -> Owned:
        """Start a process in ``folder`` with its output in ``folder/log``; its intention is in the journal already."""
        owned = launch(
            self._context.machine,
            argv=argv,
            env=env,
            cwd=folder,
            log=folder / "log",
            cookie=self._context.folder.cookie(self._phase, name),
            cgroup=cgroup,
        )
        target = owned.target(f"{self._phase}/{name}", ports=ports, files=files, drain=drain, stop=stop)
        self._held[name] = _Held(owned, target)
        return owned

    def make_cgroup(self, name: str) -> str | None:
        """For the process of this name, before its intention is written down: what starts in it is ours for ever."""
        return self._context.machine.make_cgroup(cgroup_name(self._context.folder.cookie(self._phase, name)))

    @property
    def server(self) -> Owned | None:
        held = self._held.get(SERVER)
        return held.owned if held is not None else None

    def ports(self) -> set[int]:
        """Those that our processes are to listen on."""
        return {port for held in self._held.values() for port in held.target.ports}

    def targets(self) -> list[Target]:
        return [held.target for held in self._held.values()]

    def expect_server(self, while_what: str) -> None:
        """Raise PhaseFailed where the server has ended; nothing where there is none."""
        status = self.server.exit_code() if self.server is not None else None
        if self.server is None or status is None:
            return
        raise PhaseFailed(
            expected=f"the server to live while {while_what}",
            seen=f"it ended with {status}; the last lines of its log:\n{log_tail(self.server.log, 12)}",
            todo=f"The whole log: {self.server.log}",
        )

    def note_members(self) -> None:
        """Who descends from our processes now, at most once a second: the start times prove them ours later."""
        if self._members_due.allows("members"):
            self.look_for_members()

    def look_for_members(self) -> None:
        """The same at once: when a server says that it is ready, its workers are there."""
        for name, held in self._held.items():
            seen = observe(self._context.machine, held.target)
            if seen == held.target:
                continue
            held.target = seen
            self._context.journal.append(
                EventName.SERVER_MEMBERS,
                phase=self._phase,
                process=name,
                members=[member.to_json() for member in sorted(seen.members)],
                segments=[segment.to_json() for segment in sorted(seen.segments)],
                sockets=[socket.to_json() for socket in sorted(seen.sockets)],
                derived_ports=list(seen.derived_ports),
            )

    def stop_senders(self) -> None:
        """End the jobs before their server drains: whoever still sends keeps some servers alive for ever."""
        if self.server is None:
            return
        for name, held in self._held.items():
            if name != SERVER and held.owned.exit_code() is None:
                self._terminate(name, held.owned)

    def end(self, name: str) -> None:
        """One that is not needed any more, by SIGTERM; nothing where it has ended."""
        held = self._held[name]
        if held.owned.exit_code() is None:
            self._terminate(name, held.owned)

    def _terminate(self, name: str, owned: Owned) -> None:
        machine = self._context.machine
        handle = machine.open(owned.identity)
        if handle is None:
            return
        self._context.journal.try_append(
            EventName.CHANGEOVER_SIGNAL,
            phase=self._phase,
            target=f"{self._phase}/{name}",
            pid=owned.pid,
            start_ticks=owned.identity.start_ticks,
            comm=f"changeover {name}",
            signal="SIGTERM",
            proof="started by this run and held since",
        )
        machine.signal(handle, signal.SIGTERM)
        machine.wait([handle], _SENDER_STOP_S)
        machine.close(handle)
