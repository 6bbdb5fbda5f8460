"""A machine in memory, for tests of everything above and for trying a plan: shipped, since users test too.

It follows its script by its own clock, records every signal, and never touches the real machine.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from changeover.machine.gpus import NO_GPU, ContextReading, GpuFacts, GpuProcess, GpuReading, Presence
from changeover.machine.ports import Listener, PortReading
from changeover.machine.processes import OpenPath, ProcessFacts, ProcessIdentity
from changeover.machine.protocol import Delivery, Handle, Holder
from changeover.machine.shm import Segment, SegmentFacts
from changeover.machine.simulated_world import (
    TICKS_PER_S,
    SimulatedClock,
    SimulatedGpu,
    SimulatedProcess,
)
from changeover.machine.sockets import SocketFile, UnixSocket
from changeover.machine.surroundings import Surroundings

OWN_PID = 500
SHELL_PID = 400


class SimulatedMachine:
    """The Machine protocol over a script. Pid 1 is init, 400 a shell, 500 Changeover itself (the shell's
    child).
    """

    def __init__(self, *, gpus: Iterable[SimulatedGpu] = (), adopts_orphans: bool = False) -> None:
        self._clock = SimulatedClock()
        self._boot_id = "simulated-boot"
        self._processes: list[SimulatedProcess] = []
        self._by_pid: dict[int, SimulatedProcess] = {}
        self._spawned: set[ProcessIdentity] = set()
        self._segments: dict[Segment, SegmentFacts] = {}
        self._cgroups: set[str] = set()
        self.has_cgroups = False
        self.has_mps_control = False
        self.ended_mps_clients: list[int] = []
        self.prepared_contexts: list[tuple[float, tuple[str, ...]]] = []
        self.simulated_surroundings = Surroundings(True, True, (), False)
        self.clients: dict[int, int] = {}  # established connections by local port
        self.bound_sockets: dict[SocketFile, int] = {}  # by the pid that has it bound
        self._adopts_orphans = adopts_orphans
        self.simulated_gpus = {gpu.uuid: gpu for gpu in gpus}
        self.driver_hangs = False
        self.held_ports: set[int] = set()  # held by nobody that this namespace shows
        self.signals: list[tuple[float, int, str]] = []
        self.unlinked: list[str] = []
        self.on_spawn: Callable[[int], SimulatedProcess] = lambda pid: SimulatedProcess(pid)
        self.add(SimulatedProcess(1, ppid=0, comm="systemd"))
        self.add(SimulatedProcess(SHELL_PID, ppid=1, comm="bash"))
        self.add(SimulatedProcess(OWN_PID, ppid=SHELL_PID, sid=SHELL_PID, comm="changeover"))

    # Building the world

    def add(self, process: SimulatedProcess) -> SimulatedProcess:
        """A pid that is taken by a dead process is recycled: the old one is gone for ever."""
        self._processes = [one for one in self._processes if one.pid != process.pid]
        self._by_pid[process.pid] = process
        process.start_ticks = process.start_ticks or round(self._clock.now_s * TICKS_PER_S)
        self._processes.append(process)
        return process

    def add_segment(self, path: str, inode: int = 1) -> Segment:
        segment = Segment(path, inode)
        self._segments[segment] = SegmentFacts(segment, used_mib=1.0, uid=0)
        return segment

    def signalled_pids(self) -> set[int]:
        return {pid for _, pid, _ in self.signals}

    # The Machine protocol

    @property
    def clock(self) -> SimulatedClock:
        return self._clock

    @property
    def boot_id(self) -> str:
        return self._boot_id

    @property
    def pid(self) -> int:
        return OWN_PID

    @property
    def pid_max(self) -> int:
        return 32768

    @property
    def booted_wall_s(self) -> float:
        return self._clock.wall() - self._clock.now_s

    def processes(self) -> Mapping[int, ProcessFacts]:
        self._settle()
        return {
            one.pid: one.facts(self._boot_id, self._clock.now_s) for one in self._processes if not one.reaped
        }

    def pids(self) -> Sequence[int]:
        return list(self.processes())

    def process(self, pid: int) -> ProcessFacts | None:
        return self.processes().get(pid)

    def cookie(self, pid: int) -> str | None:
        one = self._at(pid)
        return one.cookie if one is not None and one.alive else None

    def command(self, pid: int) -> tuple[str, ...]:
        one = self._at(pid)
        return one.command if one is not None and one.alive else ()

    def kernel_wait(self, pid: int) -> str:
        one = self._at(pid)
        return "uvm_spin_loop" if one is not None and one.kill_s is None else "unknown"

    def open_paths(self, pid: int) -> tuple[OpenPath, ...]:
        one = self._at(pid)
        if one is None or not one.alive:
            return ()
        sockets = (OpenPath(f"socket:[{port}]", writable=False, mapped=False) for port in one.ports)
        return (*one.opens, *sockets)

    def holders(self, prefixes: Sequence[str]) -> tuple[Holder, ...]:
        return tuple(
            Holder(process.identity, held)
            for process in self.processes().values()
            for held in self.open_paths(process.pid)
            if held.path.startswith(tuple(prefixes))
        )

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        log: Path,
        cgroup: str | None = None,
    ) -> ProcessIdentity:
        pid = max(one.pid for one in self._processes) + 1
        started = self.on_spawn(pid)
        started.ppid, started.sid, started.pgid = OWN_PID, pid, pid
        started.cookie, started.command = env.get("CHANGEOVER_COOKIE"), tuple(argv)
        started.cgroup = cgroup
        started.unreaped = True  # until reap()
        identity = self.add(started).identity(self._boot_id)
        self._spawned.add(identity)
        return identity

    def spawned(self) -> frozenset[ProcessIdentity]:
        return frozenset(self._spawned)

    def came_home(self, process: ProcessFacts) -> bool:
        return self._adopts_orphans and process.ppid == OWN_PID and process.identity not in self._spawned

    def exit_code(self, identity: ProcessIdentity) -> int | None:
        one = self._find(identity)
        return None if one is not None and one.alive else -signal.SIGTERM

    def reap(self, identity: ProcessIdentity) -> None:
        one = self._find(identity)
        if one is not None and not one.alive and one.ppid == OWN_PID:
            one.reaped = True
            self._spawned.discard(identity)

    def open(self, identity: ProcessIdentity) -> Handle | None:
        return Handle(identity, -1) if self._find(identity) is not None else None

    def signal(self, handle: Handle, signal_number: int) -> Delivery:
        number = signal.Signals(signal_number)
        self.signals.append((self._clock.now_s, handle.identity.pid, number.name))
        one = self._find(handle.identity)
        if one is None or not one.alive:
            return Delivery.GONE
        if one.denies_signals:
            return Delivery.DENIED
        if number is signal.SIGKILL and one.kill_s is not None:
            self._dies_in(one, one.kill_s)
        elif number is signal.SIGCONT and one.stopped:
            one.stopped = False
            if one.terminate_pending and one.term_s is not None:
                self._dies_in(one, one.term_s)
        elif number is signal.SIGTERM and one.stopped:
            one.terminate_pending = True
        elif number is signal.SIGTERM and one.term_s is not None:
            self._dies_in(one, one.term_s)
        return Delivery.SENT

    def wait(self, handles: Sequence[Handle], timeout_s: float) -> None:
        found = (self._find(handle.identity) for handle in handles)
        deaths = [one.dies_at_s for one in found if one is not None and one.dies_at_s is not None]
        until_s = min([self._clock.now_s + timeout_s, *deaths])
        self._clock.sleep(max(until_s - self._clock.now_s, 0.001))

    def close(self, handle: Handle) -> None:
        pass

    def gpus(self, timeout_s: float) -> GpuReading:
        if self.driver_hangs:
            self._clock.sleep(timeout_s)
            return GpuReading(Presence.UNREADABLE, note=f"NVML: no answer in {timeout_s:.1f} s")
        if not self.simulated_gpus:
            return NO_GPU
        self._settle()
        facts = (self._gpu_facts(index, gpu) for index, gpu in enumerate(self.simulated_gpus.values()))
        return GpuReading(Presence.READ, tuple(facts))

    def prepare_contexts(self, uuids: Sequence[str]) -> None:
        self.prepared_contexts.append((self._clock.now_s, tuple(uuids)))

    def fresh_contexts(self, uuids: Sequence[str], timeout_s: float) -> tuple[ContextReading, ...]:
        gpus = [self.simulated_gpus[uuid] for uuid in uuids]
        hanging = any(gpu.context_hangs for gpu in gpus)
        self._clock.sleep(timeout_s if hanging else min(0.25, timeout_s))
        return tuple(
            ContextReading(
                uuid=gpu.uuid,
                ok=not gpu.context_error and not gpu.context_hangs,
                answered=not gpu.context_hangs,
                seconds=0.25,
                note=gpu.context_error or (f"no answer in {timeout_s:.1f} s" if gpu.context_hangs else ""),
            )
            for gpu in gpus
        )

    def port(self, port: int) -> PortReading:
        self._settle()
        taken = port in self.held_ports or any(one.alive and port in one.ports for one in self._processes)
        return PortReading(port, bindable=not taken, reason="EADDRINUSE" if taken else "")

    def listeners(self) -> tuple[Listener, ...]:
        ports = {port for one in self._processes if one.alive for port in one.ports}
        return tuple(Listener(port, "127.0.0.1", port) for port in sorted(ports))

    def connections(self, ports: Sequence[int]) -> int:
        return sum(self.clients.get(port, 0) for port in ports)

    def segments(self) -> Mapping[Segment, SegmentFacts]:
        return dict(self._segments)

    def unlink(self, segment: Segment) -> bool:
        self.unlinked.append(segment.path)
        return self._segments.pop(segment, None) is not None

    def sockets(self) -> tuple[UnixSocket, ...]:
        living = {one.pid for one in self._processes if one.alive}
        return tuple(
            UnixSocket(file.inode, file) for file, pid in self.bound_sockets.items() if pid in living
        )

    def unlink_socket(self, file: SocketFile) -> bool:
        self.unlinked.append(file.path)
        return self.bound_sockets.pop(file, None) is not None

    def make_cgroup(self, name: str) -> str | None:
        if not self.has_cgroups:
            return None
        path = f"/sys/fs/cgroup/{name}"
        self._cgroups.add(path)
        return path

    def cgroup_members(self, path: str) -> frozenset[int]:
        self._settle()
        return frozenset(one.pid for one in self._in_cgroup(path) if one.alive)

    def cgroup_populated(self, path: str) -> bool | None:
        self._settle()
        return any(one.alive for one in self._in_cgroup(path)) if path in self._cgroups else None

    def kill_cgroup(self, path: str) -> bool:
        if path not in self._cgroups:
            return False
        for one in self._in_cgroup(path):
            self.signals.append((self._clock.now_s, one.pid, "SIGKILL"))
            if one.alive and one.kill_s is not None:
                self._dies_in(one, one.kill_s)
        return True

    def remove_cgroup(self, path: str) -> bool:
        if self.cgroup_populated(path) is not False:
            return False
        self._cgroups.discard(path)
        return True

    def _in_cgroup(self, path: str) -> list[SimulatedProcess]:
        return [one for one in self._processes if one.cgroup == path]

    def surroundings(self) -> Surroundings:
        return self.simulated_surroundings

    def end_mps_client(self, pid: int, timeout_s: float) -> str:
        if not self.has_mps_control:
            return "no control daemon"
        self.ended_mps_clients.append(pid)
        one = self._at(pid)
        if one is not None and one.alive:
            self._dies_in(one, 0.1)
        return ""

    @contextmanager
    def watching_gpus(self) -> Iterator[None]:
        yield

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        yield

    # The script

    def _gpu_facts(self, index: int, gpu: SimulatedGpu) -> GpuFacts:
        now_s = self._clock.now_s
        held = {one.pid: one.holds_mib(gpu.uuid, now_s) for one in self._processes}
        for one in self._processes:
            exporter = self._by_pid.get(one.imports_from or 0)
            if exporter is not None and not exporter.alive and one.alive:
                held[one.pid] += exporter.gpu_mib.get(gpu.uuid, 0.0)
        kind = "mps" if gpu.mps else "compute"
        listed = (
            GpuProcess(one.pid, held[one.pid], kind) for one in self._processes if one.alive and held[one.pid]
        )
        return GpuFacts(
            uuid=gpu.uuid,
            index=index,
            name="Simulated GPU",
            total_mib=gpu.total_mib,
            used_mib=gpu.idle_mib + sum(held.values()) + gpu.foreign_mib(now_s),
            reserved_mib=615.0 if gpu.vendor == "nvidia" else 0.0,
            memory_call="v2" if gpu.vendor == "nvidia" else "amdsmi",
            persistence=True if gpu.vendor == "nvidia" else None,
            processes=(*listed, *gpu.listed),
            health=gpu.health,
            vendor=gpu.vendor,
        )

    def _at(self, pid: int) -> SimulatedProcess | None:
        self._settle()
        return next((one for one in self._processes if one.pid == pid and not one.reaped), None)

    def _find(self, identity: ProcessIdentity) -> SimulatedProcess | None:
        one = self._at(identity.pid)
        return one if one is not None and one.identity(self._boot_id) == identity else None

    def _dies_in(self, one: SimulatedProcess, seconds: float) -> None:
        at_s = self._clock.now_s + seconds
        one.dies_at_s = at_s if one.dies_at_s is None else min(one.dies_at_s, at_s)

    def _settle(self) -> None:
        """Everybody whose time has come dies; children go to the subreaper or to init; supervisors start
        anew.
        """
        due = [one for one in self._processes if one.alive and one.dies_at_s is not None]
        for one in sorted(due, key=lambda each: each.dies_at_s or 0.0):
            if one.dies_at_s is not None and one.dies_at_s <= self._clock.now_s:
                self._die(one, one.dies_at_s)

    def _die(self, one: SimulatedProcess, at_s: float) -> None:
        one.died_at_s = at_s
        one.reaped = not one.unreaped
        home = OWN_PID if self._adopts_orphans and self._is_below_us(one) else 1
        for child in self._processes:
            if child.ppid == one.pid:
                child.ppid = home
                child.reaped = child.reaped or (home == 1 and not child.alive)
        parent = next((each for each in self._processes if each.pid == one.ppid and each.alive), None)
        if parent is not None and parent.respawns is not None:
            pid = max(each.pid for each in self._processes) + 1
            self.add(parent.respawns(pid))

    def _is_below_us(self, one: SimulatedProcess) -> bool:
        seen: set[int] = set()
        while one.ppid not in (0, 1) and one.pid not in seen:
            if one.ppid == OWN_PID:
                return True
            seen.add(one.pid)
            above = next((each for each in self._processes if each.pid == one.ppid), None)
            if above is None:
                return False
            one = above
        return False
