"""The changeover itself: carry out the stages on a machine, then verify, then give the verdict."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

from changeover.machine.gpus import GpuReading, Presence
from changeover.machine.processes import ProcessFacts, ProcessIdentity
from changeover.machine.protocol import Delivery, Handle, Holder, Machine
from changeover.teardown import stages
from changeover.teardown.budgets import Budgets
from changeover.teardown.clearance import Clearance, Refusal, SignalRecord, StageRecord, overall
from changeover.teardown.footprint import Baseline, Drain, StopPolicy, Target
from changeover.teardown.inventory import Found, Inventory, look_again, take_inventory, whole_look
from changeover.teardown.leftovers import (
    clear_sockets,
    empty_cgroups,
    held_by,
    look_at_derived_ports,
    with_held,
)
from changeover.teardown.moves import (
    BeginDrain,
    CutDrain,
    Facts,
    KillCgroups,
    ListHolders,
    Member,
    Role,
    Signal,
)
from changeover.teardown.observer import MachineSample, Observer, SilentObserver
from changeover.teardown.ownership import Proof
from changeover.teardown.probes import Question, Verification
from changeover.teardown.stages import Stage, State
from changeover.teardown.verify import Survivor

__all__ = ["MachineSample", "Observer", "SilentObserver", "clear"]

_QUICK_LOOK_S = 0.02
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/renderD")
_SAMPLING_TIMEOUT_S = 3.0  # a driver that hangs must not hold up the killing; verification is more patient
_SAMPLING_SHARE = 0.1  # of the time left, at most


def clear(
    machine: Machine,
    targets: Sequence[Target],
    baseline: Baseline,
    *,
    budgets: Budgets | None = None,
    observer: Observer | None = None,
    terminated: frozenset[ProcessIdentity] = frozenset(),
) -> Clearance:
    """Stop the targets and prove that the machine is as it was before them.

    ``terminated`` got SIGTERM from an earlier attempt that was cut off: they get their time, and no second one.

    Ends within ``budgets.total_s`` (plus one look at the machine). Ctrl-C and SIGTERM to Changeover wait
    until it is over. Never raises for what the targets do: what goes wrong is in the clearance.
    """
    with machine.uninterrupted(), machine.watching_gpus():
        return _Changeover(
            machine, targets, baseline, budgets or Budgets(), observer or SilentObserver(), terminated
        ).run()


class _Changeover:
    def __init__(
        self,
        machine: Machine,
        targets: Sequence[Target],
        baseline: Baseline,
        budgets: Budgets,
        observer: Observer,
        terminated: frozenset[ProcessIdentity],
    ) -> None:
        self._machine = machine
        self._terminated = terminated
        self._targets = tuple(targets)
        self._baseline = baseline
        self._budgets = budgets
        self._observer = observer
        self._started_s = machine.clock.monotonic()
        self._handles: dict[ProcessIdentity, Handle] = {}
        self._known: dict[ProcessIdentity, Found] = {}
        self._denied: dict[ProcessIdentity, str] = {}
        self._refusals: dict[Refusal, None] = {}
        self._stages: list[StageRecord] = []
        self._signals: list[SignalRecord] = []
        self._drain_notes: list[str] = []
        self._lost_requests: int | None = None
        self._device_holders: tuple[Holder, ...] = ()
        self._mps_clients: frozenset[int] = frozenset()
        self._amd = False
        self._gpus_answer = True
        self._gpus_present = True
        self._asked = 0
        self._timed_out = False
        self._first_gpus: GpuReading | None = None
        self._last_gpus: tuple[tuple[str, float], ...] = ()
        self._inventory: Inventory | None = None

    def run(self) -> Clearance:
        state = stages.begin(self._started_s, self._budgets, self._terminated)
        while state.stage is not Stage.VERIFY:
            facts = self._look(state)
            moved, state = self._decide(state, facts)
            if not moved:
                self._wait(state, facts)
        self._look(state)
        verification = Verification(
            self._machine, self._question(), self._budgets, state.end_s, lambda gpus: self._sample(gpus)
        )
        evidence = (
            *verification.evidence(),
            *clear_sockets(self._machine, self._targets),
            *look_at_derived_ports(self._machine, self._targets, frozenset(self._known)),
            *empty_cgroups(self._machine, self._targets),
        )
        seconds = self._now_s() - state.entered_s
        self._record(StageRecord("verify", seconds, "proved", f"{len(evidence)} items"))
        self._sample(None)
        for handle in self._handles.values():
            self._machine.close(handle)
        return Clearance(
            verdict=overall(one.verdict for one in evidence),
            evidence=evidence,
            stages=tuple(self._stages),
            signals=tuple(self._signals),
            refusals=tuple(self._refusals),
            seconds=self._now_s() - self._started_s,
            lost_requests=self._lost_requests,
        )

    def _look(self, state: State) -> Facts:
        """One look at the machine; whoever is new gets a handle, and his segments are noted before any
        signal.
        """
        inventory = self._inventory_now(state)
        new = [one for one in inventory.found if one.process.identity not in self._known]
        self._targets = tuple(
            with_held(target, held_by(self._machine, mine)) if mine else target
            for target in inventory.targets
            for mine in ([one.process for one in new if one.target == target.name],)
        )
        for one in new:
            self._known[one.process.identity] = one
            handle = self._machine.open(one.process.identity)
            if handle is not None:
                self._handles[one.process.identity] = handle
        self._refusals.update(dict.fromkeys(inventory.refusals))
        self._inventory = inventory
        self._sample(self._read_gpus())
        members = tuple(
            # Proof and role of the first look: from the second on everybody is merely "recorded", and a
            # tracker that is about to end has no command line any more to tell it by.
            Member(
                one.process.identity,
                self._known[one.process.identity].role,
                self._known[one.process.identity].proof,
                one.process.dumping_core,
                fast=state.stage is Stage.DRAIN and self._may_be_fast(one),
            )
            for one in inventory.alive
            if not one.refusal and one.process.identity not in self._denied
        )
        can_drain = any(target.drain is not None for target in self._targets)
        running = self._running() if state.stage is Stage.DRAIN and state.began else None
        return Facts(
            members,
            can_drain=can_drain,
            running=running,
            mute=state.stage is Stage.DRAIN and state.began and running is None and not self._timed_out,
            proven_idle=running == 0 and self._proves_idle(),
            populated=state.stage is Stage.TRACKER and self._populated(),
        )

    def _inventory_now(self, state: State) -> Inventory:
        """Whole at the start and at the end; in between those whom we know, and whoever is new."""
        if self._inventory is None:
            return take_inventory(self._machine, self._targets)
        look = whole_look if state.stage is Stage.VERIFY else look_again
        return look(self._machine, self._targets, self._inventory)

    def _may_be_fast(self, one: Found) -> bool:
        """Its profile says so, MPS would not suffer, and it has nothing open to write where the phase writes.

        Never on AMD: a process that is killed in the middle of HIP may leave a context that nothing but a reboot gives
        back (ROCm/aiter #2061, ROCm/mori #473).
        """
        target = next(target for target in self._targets if target.name == one.target)
        if target.stop is not StopPolicy.FAST or self._amd or one.process.pid in self._mps_clients:
            return False
        if not target.files:
            return True
        held = self._machine.open_paths(one.process.pid)
        return not any(path.writable and path.path.startswith(target.files) for path in held)

    def _populated(self) -> bool:
        paths = (target.cgroup for target in self._targets if target.cgroup is not None)
        return any(self._machine.cgroup_populated(path) for path in paths)

    def _decide(self, state: State, facts: Facts) -> tuple[bool, State]:
        """Step until the machine has to be looked at again."""
        moved = False
        while True:
            step = stages.step(state, facts, self._now_s(), self._budgets)
            for action in step.actions:
                match action:
                    case BeginDrain():
                        self._each_drain(lambda drain: drain.begin())
                    case CutDrain():
                        self._each_drain(lambda drain: drain.cut())
                    case KillCgroups():
                        self._kill_cgroups()
                    case ListHolders() if self._gpus_present:
                        self._device_holders = self._machine.holders(_DEVICES)
                    case ListHolders():
                        pass
                    case Signal():
                        self._send(action)
            state = step.state
            if step.left is not None:
                self._leave(step.left, state)
            if step.left is None or step.actions or state.stage in (Stage.VERIFY, Stage.DRAIN):
                return moved or bool(step.actions), state
            moved = True

    def _leave(self, left: stages.Left, state: State) -> None:
        detail = left.detail
        if left.stage is Stage.DRAIN:
            names = (target.drain.name for target in self._targets if target.drain is not None)
            asked = f"{', '.join(dict.fromkeys(names))}, asked {self._asked} times"
            detail = "; ".join((left.detail, asked, *self._drain_notes))
        if left.stage is Stage.DRAIN and left.outcome == "expired":
            self._lost_requests = state.running
        self._record(StageRecord(left.stage.value, left.seconds, left.outcome, detail))

    def _record(self, record: StageRecord) -> None:
        self._stages.append(record)
        self._observer.stage(record)

    def _send(self, order: Signal) -> None:
        handle = self._handles.get(order.identity)
        if handle is None:
            return
        found = self._known[order.identity]
        if order.number is signal.SIGKILL and order.identity.pid in self._mps_clients:
            why_not = self._machine.end_mps_client(order.identity.pid, self._budgets.probe_s)
            if why_not:
                self._leave_alone(
                    found, f"a client of CUDA MPS must not be killed with work on it: {why_not}"
                )
                return
        record = SignalRecord(
            pid=order.identity.pid,
            start_ticks=order.identity.start_ticks,
            comm=found.process.comm,
            signal=signal.Signals(order.number).name,
            proof=order.proof.value,
            target=found.target,
        )
        self._prepare_contexts()
        self._observer.intent(record)
        self._signals.append(record)
        delivery = self._machine.signal(handle, order.number)
        self._observer.delivered(record, delivery)
        if delivery is Delivery.DENIED:
            self._leave_alone(found, f"the kernel denied {record.signal}: another user's process")

    def _prepare_contexts(self) -> None:
        """From the first signal on it is seconds until they are needed."""
        if not self._signals and self._gpus_answer and self._first_gpus is not None:
            self._machine.prepare_contexts([gpu.uuid for gpu in self._first_gpus.gpus])

    def _leave_alone(self, one: Found, reason: str) -> None:
        identity = one.process.identity
        self._denied[identity] = reason
        self._refusals[Refusal(identity.pid, identity.start_ticks, one.process.comm, reason)] = None

    def _kill_cgroups(self) -> None:
        """Write-ahead as for any signal: a line for each member that is seen, and one for the cgroup."""
        for target in self._targets:
            if target.cgroup is None or not self._machine.cgroup_populated(target.cgroup):
                continue
            inside = self._machine.cgroup_members(target.cgroup)
            seen = [one for one in self._known.values() if one.process.pid in inside]
            records = [_killed_with_its_cgroup(one.process, target.name) for one in seen]
            name = target.cgroup.rsplit("/", 1)[-1]
            records.append(SignalRecord(0, 0, f"cgroup {name}", "SIGKILL", Proof.CGROUP.value, target.name))
            self._prepare_contexts()
            for record in records:
                self._observer.intent(record)
                self._signals.append(record)
            done = self._machine.kill_cgroup(target.cgroup)
            for record in records:
                self._observer.delivered(record, Delivery.SENT if done else Delivery.DENIED)

    def _each_drain(self, ask: Callable[[Drain], object]) -> list[Any]:
        """The answers, None where there is none; nothing that a server does may stop a teardown."""
        answers: list[Any] = []
        for target in self._targets:
            if target.drain is not None:
                try:
                    answers.append(ask(target.drain))
                except Exception as error:  # noqa: BLE001
                    note = f"{target.drain.name}: {type(error).__name__}: {error}"
                    self._drain_notes = [*dict.fromkeys((*self._drain_notes, note))]
                    answers.append(None)
                    self._timed_out = self._timed_out or isinstance(error, TimeoutError)
        return answers

    def _running(self) -> int | None:
        """Requests in all servers together; None as soon as one of them does not say."""
        self._asked += 1
        self._timed_out = False
        running = self._each_drain(lambda drain: drain.running())
        return None if None in running else sum(running)

    def _proves_idle(self) -> bool:
        return all(self._each_drain(lambda drain: drain.proves_idle()))

    def _wait(self, state: State, facts: Facts) -> None:
        waited_for = [self._handles[one.identity] for one in facts.members if one.identity in self._handles]
        if not waited_for:
            self._machine.clock.sleep(_QUICK_LOOK_S)
            return
        left_s = state.deadline_s - self._now_s()
        self._machine.wait(waited_for, min(self._budgets.sample_s, max(_QUICK_LOOK_S, left_s)))

    def _read_gpus(self) -> GpuReading | None:
        if not self._gpus_answer:
            return None
        left_s = self._started_s + self._budgets.total_s - self._now_s()
        reading = self._machine.gpus(max(0.0, min(_SAMPLING_TIMEOUT_S, _SAMPLING_SHARE * left_s)))
        self._gpus_answer = reading.presence is Presence.READ
        self._gpus_present = reading.presence is not Presence.ABSENT
        self._first_gpus = self._first_gpus or reading
        listed = (one for gpu in reading.gpus for one in gpu.processes if one.kind == "mps")
        self._mps_clients = frozenset(one.pid for one in listed)
        self._amd = any(gpu.vendor == "amd" for gpu in reading.gpus)
        return reading

    def _sample(self, reading: GpuReading | None) -> None:
        if reading is not None:
            self._last_gpus = tuple((gpu.uuid, gpu.used_mib) for gpu in reading.gpus)
        alive = self._inventory.alive if self._inventory is not None else ()
        self._observer.sample(
            MachineSample(
                t_s=self._now_s() - self._started_s,
                processes=len(alive),
                rss_mib=sum(one.process.rss_mib for one in alive),
                gpus=self._last_gpus,
            )
        )

    def _question(self) -> Question:
        """Reap what is ours to reap, and say of every survivor why it lives."""
        alive = self._inventory.alive if self._inventory is not None else ()
        for identity in self._known:
            self._machine.reap(identity)
        survivors = tuple(Survivor(one.process, self._why_alive(one)) for one in alive)
        return Question(
            self._targets,
            self._baseline,
            frozenset(self._known),
            survivors,
            self._strangers(),
            self._first_gpus,
        )

    def _strangers(self) -> tuple[ProcessIdentity, ...]:
        holders = {holder.identity for holder in self._device_holders} - set(self._known)
        return tuple(sorted(one for one in holders if not self._is_our_own(one.pid)))

    def _is_our_own(self, pid: int) -> bool:
        """Ourselves, or our own probe that reads the GPUs: a child that we did not launch as a server or job."""
        process = self._machine.process(pid)
        if process is None or process.identity in self._machine.spawned():
            return False
        return self._machine.pid in (pid, process.ppid)

    def _why_alive(self, one: Found) -> str:
        refusal = one.refusal or self._denied.get(one.process.identity, "")
        if refusal:
            return f"not signalled: {refusal}"
        role = "tracker, " if one.role is Role.TRACKER else ""
        return f"{role}survives SIGKILL, waits in {self._machine.kernel_wait(one.process.pid)}"

    def _now_s(self) -> float:
        return self._machine.clock.monotonic()


def _killed_with_its_cgroup(process: ProcessFacts, target: str) -> SignalRecord:
    identity = process.identity
    return SignalRecord(
        identity.pid, identity.start_ticks, process.comm, "SIGKILL", Proof.CGROUP.value, target
    )
