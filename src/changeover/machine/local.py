"""The machine that Changeover itself runs on."""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import subprocess
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from changeover.machine import cgroups, mps, subreaper
from changeover.machine.amd_gpus import read_amd
from changeover.machine.clock import Clock, SystemClock
from changeover.machine.contexts import FreshContexts
from changeover.machine.gpu_reader import GpuReader
from changeover.machine.gpus import ContextReading, GpuReading, joined, read_nvidia
from changeover.machine.ports import Listener, PortReading, count_connections, read_listeners, read_port
from changeover.machine.processes import (
    PROC,
    OpenPath,
    ProcessFacts,
    ProcessIdentity,
    ProcessTable,
    read_boot_id,
    read_command,
    read_cookie,
    read_kernel_wait,
    read_open_paths,
    read_pids,
    read_process,
)
from changeover.machine.protocol import Delivery, Handle, Holder
from changeover.machine.shm import SHM_ROOT, Segment, SegmentFacts, read_segments, unlink_segment
from changeover.machine.sockets import SocketFile, UnixSocket, read_sockets, unlink_socket
from changeover.machine.surroundings import Surroundings, read_surroundings

_PIDFD_RETRY_S = 0.01


class LocalMachine:
    """The Machine protocol over Linux (5.3 or later: pidfds).

    ``adopt_orphans`` makes this process a subreaper; for Changeover's own runner only.
    """

    def __init__(
        self, *, clock: Clock | None = None, adopt_orphans: bool = False, shm_root: Path = SHM_ROOT
    ) -> None:
        self._clock = clock or SystemClock()
        self._boot_id = read_boot_id()
        self._table = ProcessTable(self._boot_id)
        self._shm_root = shm_root
        self._children: dict[ProcessIdentity, subprocess.Popen[bytes]] = {}
        self._exit_codes: dict[ProcessIdentity, int] = {}
        self._subreaper = adopt_orphans
        self._gpu_reader: GpuReader | None = None
        self._contexts = FreshContexts()
        if adopt_orphans:
            subreaper.become_subreaper()

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def boot_id(self) -> str:
        return self._boot_id

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def pid_max(self) -> int:
        return int((PROC / "sys/kernel/pid_max").read_text())

    @property
    def booted_wall_s(self) -> float:
        return self._clock.wall() - float((PROC / "uptime").read_text().split()[0])

    def processes(self) -> Mapping[int, ProcessFacts]:
        return self._table.read()

    def pids(self) -> Sequence[int]:
        return read_pids()

    def process(self, pid: int) -> ProcessFacts | None:
        return read_process(pid, self._boot_id)

    def cookie(self, pid: int) -> str | None:
        return read_cookie(pid)

    def command(self, pid: int) -> tuple[str, ...]:
        return read_command(pid)

    def kernel_wait(self, pid: int) -> str:
        return read_kernel_wait(pid)

    def open_paths(self, pid: int) -> tuple[OpenPath, ...]:
        return read_open_paths(pid)

    def holders(self, prefixes: Sequence[str]) -> tuple[Holder, ...]:
        wanted = tuple(prefixes)
        return tuple(
            Holder(process.identity, held)
            for process in self.processes().values()
            for held in read_open_paths(process.pid, prefixes=wanted)
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
        program = list(argv)
        if cgroup is not None:
            if shutil.which(argv[0], path=env.get("PATH")) is None and not (cwd / argv[0]).is_file():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
            program = ["/bin/sh", "-c", cgroups.ENTER, "sh", cgroup, *argv]
        with log.open("ab") as sink:
            child = subprocess.Popen(
                program,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                close_fds=True,
            )
        process = self.process(child.pid)
        if process is None:  # nobody but us can reap our child, so it is at least a zombie
            raise ChildProcessError(
                errno.ECHILD, "the new child was reaped by somebody else (SIGCHLD ignored?)"
            )
        self._children[process.identity] = child
        return process.identity

    def spawned(self) -> frozenset[ProcessIdentity]:
        return frozenset(self._children)

    def came_home(self, process: ProcessFacts) -> bool:
        started_here = any(process.pid == identity.pid for identity in self._children)
        return (
            self._subreaper
            and process.ppid == self.pid
            and process.sid != os.getsid(0)  # what other code here starts stays in our session (probes do)
            and not started_here
        )

    def exit_code(self, identity: ProcessIdentity) -> int | None:
        """WNOWAIT leaves the zombie: while it is there, nobody else gets its pid or session number."""
        if identity in self._exit_codes:
            return self._exit_codes[identity]
        if identity not in self._children:
            raise ChildProcessError(errno.ECHILD, f"pid {identity.pid} was not started by this process")
        ended = os.waitid(os.P_PID, identity.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self._exit_codes[identity] = code
        return code

    def reap(self, identity: ProcessIdentity) -> None:
        child = self._children.get(identity)
        if child is not None:
            code = child.poll()
            if code is not None:
                self._exit_codes[identity] = code
                del self._children[identity]
            return
        process = self.process(identity.pid)
        if process is not None and process.identity == identity and self.came_home(process):
            try:
                os.waitpid(identity.pid, os.WNOHANG)
            except ChildProcessError:
                return

    def open(self, identity: ProcessIdentity) -> Handle | None:
        """Open the pidfd, then look again who has the pid: only then is it a hold on the one we mean."""
        try:
            fd = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            return None
        except OSError as error:
            # Some kernels answer EINVAL for a process that was killed just now (and for a pid that is a
            # thread's).
            self._clock.sleep(_PIDFD_RETRY_S)
            process = self.process(identity.pid)
            if error.errno == errno.EINVAL and (
                process is None or process.identity != identity or not process.alive
            ):
                return None
            raise
        process = self.process(identity.pid)
        if process is None or process.identity != identity:
            os.close(fd)
            return None
        return Handle(identity, fd)

    def signal(self, handle: Handle, signal_number: int) -> Delivery:
        try:
            signal.pidfd_send_signal(handle.fd, signal_number)
        except ProcessLookupError:
            return Delivery.GONE
        except PermissionError:
            return Delivery.DENIED
        return Delivery.SENT

    def wait(self, handles: Sequence[Handle], timeout_s: float) -> None:
        if not handles:
            self._clock.sleep(timeout_s)
            return
        poll = select.poll()
        for handle in handles:
            poll.register(handle.fd, select.POLLIN)
        poll.poll(max(0, round(timeout_s * 1000)))

    def close(self, handle: Handle) -> None:
        os.close(handle.fd)

    def gpus(self, timeout_s: float) -> GpuReading:
        reader = self._gpu_reader
        nvidia = read_nvidia(timeout_s) if reader is None else reader.read(timeout_s)
        return joined(nvidia, read_amd(timeout_s))

    def surroundings(self) -> Surroundings:
        return read_surroundings()

    def end_mps_client(self, pid: int, timeout_s: float) -> str:
        return mps.end_client(pid, timeout_s)

    @contextmanager
    def watching_gpus(self) -> Iterator[None]:
        if self._gpu_reader is not None:  # somebody outside watches already
            yield
            return
        self._gpu_reader = GpuReader()
        self._gpu_reader.begin()
        try:
            yield
        finally:
            self._gpu_reader.close()
            self._gpu_reader = None
            self._contexts.close()

    def prepare_contexts(self, uuids: Sequence[str]) -> None:
        if self._gpu_reader is not None:  # outside a block nobody would end them
            self._contexts.prepare(uuids)

    def fresh_contexts(self, uuids: Sequence[str], timeout_s: float) -> tuple[ContextReading, ...]:
        return self._contexts.make(uuids, timeout_s)

    def port(self, port: int) -> PortReading:
        return read_port(port)

    def listeners(self) -> tuple[Listener, ...]:
        return read_listeners()

    def connections(self, ports: Sequence[int]) -> int:
        return count_connections(ports)

    def segments(self) -> Mapping[Segment, SegmentFacts]:
        return read_segments(self._shm_root)

    def unlink(self, segment: Segment) -> bool:
        return unlink_segment(segment)

    def sockets(self) -> tuple[UnixSocket, ...]:
        return read_sockets()

    def unlink_socket(self, file: SocketFile) -> bool:
        return unlink_socket(file)

    def make_cgroup(self, name: str) -> str | None:
        return cgroups.make_cgroup(name)

    def cgroup_members(self, path: str) -> frozenset[int]:
        return cgroups.read_members(path)

    def cgroup_populated(self, path: str) -> bool | None:
        return cgroups.is_populated(path)

    def kill_cgroup(self, path: str) -> bool:
        return cgroups.kill(path)

    def remove_cgroup(self, path: str) -> bool:
        return cgroups.remove(path)

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """A second Ctrl-C must not leave a half-stopped server (ai-dynamo/dynamo #1889).

        Python runs handlers in the main thread only; elsewhere there is nothing to hold back.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        waiting: list[int] = []

        def note(number: int, _frame: types.FrameType | None) -> None:
            waiting.append(number)

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            for held_back in dict.fromkeys(waiting):
                signal.raise_signal(held_back)
