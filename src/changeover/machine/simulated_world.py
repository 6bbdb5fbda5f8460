"""What a simulated machine is made of: a clock that moves only when it is told to, processes and GPUs with
a script.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from changeover.machine.gpus import GpuProcess
from changeover.machine.processes import PF_DUMPCORE, OpenPath, ProcessFacts, ProcessIdentity

TICKS_PER_S = 100


class SimulatedClock:
    """Time that passes when somebody sleeps or waits, and at no other moment."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += max(0.0, seconds)


@dataclass
class SimulatedProcess:
    """A process with a script for what it does when it is told to end.

    ``term_s`` and ``kill_s`` are the seconds from the signal to its death; None means that it ignores
    SIGTERM, or that it cannot be killed (state D in a driver). ``respawns`` is what it starts again while
    it lives, the moment that its child dies. A dead process holds GPU memory for ``release_lag_s`` more (a
    deferred close); what it has exported by CUDA IPC stays with a process that ``imports_from`` it, and is listed as
    that one's from then on. It stays as a zombie for as long as its parent does not look (``unreaped``).
    """

    pid: int
    ppid: int = 1
    sid: int = 0
    pgid: int = 0
    start_ticks: int = 0
    comm: str = "worker"
    cookie: str | None = None
    cgroup: str | None = None
    uid: int = 0
    command: tuple[str, ...] = ()
    term_s: float | None = 0.1
    kill_s: float | None = 0.05
    dies_at_s: float | None = None
    stopped: bool = False
    dumping_core_until_s: float = 0.0
    denies_signals: bool = False
    main_thread_dead: bool = False
    unreaped: bool = False
    gpu_mib: dict[str, float] = field(default_factory=dict)
    release_lag_s: float = 0.0
    imports_from: int | None = None
    ports: tuple[int, ...] = ()
    opens: tuple[OpenPath, ...] = ()
    rss_mib: float = 100.0
    respawns: Callable[[int], SimulatedProcess] | None = None
    died_at_s: float | None = None
    reaped: bool = False
    terminate_pending: bool = False

    def __post_init__(self) -> None:
        self.sid = self.sid or self.pid
        self.pgid = self.pgid or self.sid

    @property
    def alive(self) -> bool:
        return self.died_at_s is None

    def identity(self, boot_id: str) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.start_ticks, boot_id)

    def facts(self, boot_id: str, now_s: float) -> ProcessFacts:
        return ProcessFacts(
            identity=self.identity(boot_id),
            ppid=self.ppid,
            pgid=self.pgid,
            sid=self.sid,
            state=self._state(),
            comm=self.comm,
            uid=self.uid,
            flags=PF_DUMPCORE if now_s < self.dumping_core_until_s else 0,
            cpu_ticks=0,
            rss_mib=self.rss_mib if self.alive else 0.0,
            living_tasks=1 if self.alive else 0,
        )

    def holds_mib(self, uuid: str, now_s: float) -> float:
        held = self.gpu_mib.get(uuid, 0.0)
        return held if self.died_at_s is None or now_s < self.died_at_s + self.release_lag_s else 0.0

    def _state(self) -> str:
        if not self.alive or self.main_thread_dead:
            return "Z"
        if self.kill_s is None:
            return "D"
        return "T" if self.stopped else "S"


def nothing_foreign(_now_s: float) -> float:
    return 0.0


@dataclass
class SimulatedGpu:
    """A GPU: what it always holds, what strangers hold over time, and what the driver lists besides the
    truth.

    ``foreign_mib`` gives MiB at a moment of the clock; ``listed`` are entries with whatever pids the test
    wants (another namespace's, impossible ones). ``health`` in words, as ``GpuFacts`` has it.
    """

    uuid: str
    total_mib: float = 143_771.0
    idle_mib: float = 0.0
    foreign_mib: Callable[[float], float] = nothing_foreign
    listed: tuple[GpuProcess, ...] = ()
    mps: bool = False
    health: tuple[str, ...] = ()
    context_error: str = ""
    context_hangs: bool = False
    vendor: str = "nvidia"
