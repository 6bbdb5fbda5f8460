"""Ask the machine until each judgement of ``verify`` is made, every wait inside its budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from changeover.machine.gpus import GpuFacts, GpuReading, Presence
from changeover.machine.processes import ProcessIdentity
from changeover.machine.protocol import Machine
from changeover.machine.shm import SHM_ROOT, Segment, is_segment
from changeover.teardown import verify
from changeover.teardown.budgets import Budgets
from changeover.teardown.clearance import Evidence, Verdict
from changeover.teardown.footprint import Baseline, Target
from changeover.teardown.gpu_memory import judge_gpu
from changeover.teardown.inventory import describe

_QUICK_S, _QUICK_LOOK_S = 1.0, 0.01  # what is going to be clean mostly is so within a second
_SETTLE_S = 1.0  # for a stranger's segment or file that comes and goes while we look
_CONTEXT_SHARE = 0.4  # of the time left: kept for the fresh contexts and the second look at memory


@dataclass(frozen=True)
class Question:
    """What is to be verified.

    ``known`` are all processes ever proven ours, ``survivors`` those still alive; ``device_holders`` are
    strangers with a GPU's device file open. ``before`` is what the driver said while the targets still lived.
    """

    targets: tuple[Target, ...]
    baseline: Baseline
    known: frozenset[ProcessIdentity]
    survivors: tuple[verify.Survivor, ...]
    device_holders: tuple[ProcessIdentity, ...] = ()
    before: GpuReading | None = None


class Verification:
    """One verification with its deadline (monotonic seconds) and the sink for GPU readings."""

    def __init__(
        self,
        machine: Machine,
        question: Question,
        budgets: Budgets,
        deadline_s: float,
        sample: Callable[[GpuReading | None], None],
    ) -> None:
        self._machine = machine
        self._question = question
        self._budgets = budgets
        self._deadline_s = deadline_s
        self._sample = sample
        self._last: GpuReading | None = None

    def evidence(self) -> tuple[Evidence, ...]:
        """Everything that was looked at, in the order in which it was."""
        return (
            self._processes(),
            *(self._port(port) for port in dict.fromkeys(self._ports())),
            self._segments(),
            *self._files(),
            *self._devices(),
            *self._gpus(),
        )

    def _processes(self) -> Evidence:
        unreaped = []
        for identity in sorted(self._question.known):
            process = self._machine.process(identity.pid)
            if process is not None and process.identity == identity and not process.alive:
                parent = self._machine.process(process.ppid)
                unreaped.append((process, f"pid {process.ppid} ({parent.comm if parent else 'not visible'})"))
        return verify.judge_processes(len(self._question.known), self._question.survivors, unreaped)

    def _ports(self) -> list[int]:
        return [port for target in self._question.targets for port in target.ports]

    def _port(self, port: int) -> Evidence:
        def judge(patience_spent: bool, expired: bool) -> Evidence | None:
            reading = self._machine.port(port)
            owners = [] if reading.bindable else self._owners(port)
            return verify.judge_port(reading, owners, patience_spent=patience_spent, expired=expired)

        return self._until(judge, self._budgets.ports_s)

    def _owners(self, port: int) -> list[str]:
        inodes = [f"socket:[{one.inode}]" for one in self._machine.listeners() if one.port == port]
        identities = {holder.identity for holder in self._machine.holders(inodes)} if inodes else set()
        return [describe(self._machine, identity) for identity in sorted(identities)]

    def _segments(self) -> Evidence:
        removed: list[Segment] = []

        def judge(_patience_spent: bool, expired: bool) -> Evidence | None:
            new = self._new_segments()
            if not self._question.survivors:
                gone = [segment for segment in sorted(new.removable) if self._machine.unlink(segment)]
                removed.extend(gone)
                new = verify.NewSegments(new.removable - set(gone), new.held, new.nobodys)
            return verify.judge_segments(new, removed, expired=expired)

        return self._until(judge, _SETTLE_S)

    def _new_segments(self) -> verify.NewSegments:
        now = frozenset(self._machine.segments())
        new = now - self._question.baseline.segments
        holders: dict[Segment, tuple[str, ...]] = {}
        for holder in self._machine.holders((f"{SHM_ROOT}/", *(one.path for one in new))) if new else ():
            for segment in new:
                if is_segment(holder.held, segment):
                    who = describe(self._machine, holder.identity)
                    holders[segment] = tuple(dict.fromkeys((*holders.get(segment, ()), who)))
        proven = frozenset().union(*(target.segments for target in self._question.targets))
        return verify.sort_segments(now, self._question.baseline.segments, proven, holders)

    def _files(self) -> tuple[Evidence, ...]:
        prefixes = tuple(dict.fromkeys(path for target in self._question.targets for path in target.files))
        if not prefixes:
            return ()

        def judge(_patience_spent: bool, expired: bool) -> Evidence | None:
            writers = {
                holder.identity
                for holder in self._machine.holders(prefixes)
                if holder.held.writable and holder.identity.pid != self._machine.pid
                if any(_is_below(holder.held.path, prefix) for prefix in prefixes)
            }
            described = [describe(self._machine, identity) for identity in sorted(writers)]
            return verify.judge_files(described, expired=expired)

        return (self._until(judge, _SETTLE_S),)

    def _devices(self) -> tuple[Evidence, ...]:
        if self._question.baseline.presence is Presence.ABSENT:
            return ()
        return (
            verify.judge_devices([describe(self._machine, one) for one in self._question.device_holders]),
        )

    def _gpus(self) -> tuple[Evidence, ...]:
        """Memory, a fresh context on each, memory again (the context must leave nothing), health."""
        reading = self._read_gpus()
        said = verify.judge_presence(self._question.baseline, reading)
        if said is not None:
            return (said,)
        left_s = self._deadline_s - self._machine.clock.monotonic()
        released = self._released(min(self._budgets.gpu_release_s, left_s * (1 - _CONTEXT_SHARE)))
        health = [verify.judge_health(gpu) for gpu in reading.gpus]
        if any(one.verdict is not Verdict.CLEAN for one in (*released, *health)):
            return (*released, *health)
        uuids = [gpu.uuid for gpu in reading.gpus]
        contexts = [verify.judge_context(one) for one in self._machine.fresh_contexts(uuids, self._probe_s())]
        left_s = self._deadline_s - self._machine.clock.monotonic()
        return (*self._released(left_s), *health, *contexts)

    def _released(self, budget_s: float) -> tuple[Evidence, ...]:
        samples: dict[str, list[GpuFacts]] = {}
        done: dict[str, Evidence] = {}
        unreadable: list[Evidence] = []

        def judge(patience_spent: bool, expired: bool) -> Evidence | None:
            reading = self._read_gpus()
            said = verify.judge_presence(self._question.baseline, reading)
            if said is not None:
                unreadable.append(said)
                return said
            for gpu in reading.gpus:
                samples.setdefault(gpu.uuid, []).append(gpu)
                judged = self._judge_gpu(samples[gpu.uuid], patience_spent, expired)
                done.pop(gpu.uuid, None)
                if judged is not None:
                    done[gpu.uuid] = judged
            return next(iter(done.values())) if len(done) == len(reading.gpus) else None

        self._until(judge, budget_s)
        return (*done.values(), *unreadable)

    def _judge_gpu(self, samples: Sequence[GpuFacts], patience_spent: bool, expired: bool) -> Evidence | None:
        visible = {}
        for listed in samples[-1].processes:
            process = self._machine.process(listed.pid)
            if process is not None and process.identity not in self._question.known:
                visible[listed.pid] = describe(self._machine, process.identity)
        return judge_gpu(
            samples,
            self._question.baseline.by_uuid().get(samples[-1].uuid),
            visible,
            frozenset(identity.pid for identity in self._question.known) - set(visible),
            self._machine.pid_max,
            self._budgets,
            self._shares_before(samples[-1].uuid),
            self._machine.surroundings() if expired else None,
            patience_spent=patience_spent,
            expired=expired,
        )

    def _shares_before(self, uuid: str) -> dict[int, float]:
        """MiB by pid while the targets lived."""
        if self._question.before is None:
            return {}
        gpu = self._question.before.by_uuid().get(uuid)
        return {one.pid: one.used_mib or 0.0 for one in gpu.processes} if gpu is not None else {}

    def _read_gpus(self) -> GpuReading:
        reading = self._machine.gpus(self._probe_s())
        if reading.presence is Presence.READ and reading != self._last:
            self._sample(reading)
            self._last = reading
        return reading

    def _probe_s(self) -> float:
        left_s = self._deadline_s - self._machine.clock.monotonic()
        return max(0.0, min(self._budgets.probe_s, left_s))

    def _until(self, judge: Callable[[bool, bool], Evidence | None], budget_s: float) -> Evidence:
        """Judge, wait a sample, judge again; the last time with ``expired``, which must answer."""
        clock = self._machine.clock
        started_s = clock.monotonic()
        until_s = min(started_s + budget_s, self._deadline_s)
        noted_s = started_s
        while True:
            now_s = clock.monotonic()
            expired = now_s >= until_s
            judged = judge(now_s >= started_s + self._budgets.foreign_patience_s, expired)
            if judged is not None:
                return judged
            if expired:
                raise AssertionError("a judgement without an answer at its deadline")
            if now_s >= noted_s + self._budgets.sample_s:
                self._sample(None)
                noted_s = now_s
            pause_s = _QUICK_LOOK_S if now_s < started_s + _QUICK_S else self._budgets.sample_s
            clock.sleep(min(pause_s, self._budgets.sample_s, max(0.0, until_s - now_s)))


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
