"""The changeover itself: carry out the stages on a machine, then verify, then give the verdict."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from changeover.machine.gpus import GpuReading, Presence
from changeover.machine.processes import ProcessIdentity
from changeover.machine.protocol import Delivery, Handle, Holder, Machine
from changeover.teardown import stages
from changeover.teardown.budgets import Budgets
from changeover.teardown.clearance import Clearance, Refusal, SignalRecord, StageRecord, overall
from changeover.teardown.footprint import Baseline, Target
from changeover.teardown.inventory import Found, Inventory, segments_held, take_inventory
from changeover.teardown.moves import BeginDrain, Facts, ListHolders, Member, Role, Signal
from changeover.teardown.observer import MachineSample, Observer, SilentObserver
from changeover.teardown.probes import Question, Verification
from changeover.teardown.stages import Stage, State
from changeover.teardown.verify import Survivor

__all__ = ["MachineSample", "Observer", "SilentObserver", "clear", "observe"]

_QUICK_LOOK_S = 0.02
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/renderD")
_SAMPLING_TIMEOUT_S = 3.0  # a driver that hangs must not hold up the killing; verification is more patient
_SAMPLING_SHARE = 0.1  # of the time left, at most


def observe(machine: Machine, target: Target) -> Target:
    """The target with the members and segments seen now added; call it while the phase runs.

    What was seen once is provable for ever: a worker that leaves the session and drops its environment
    afterwards is still known by its start time.
    """
    inventory = take_inventory(machine, (target,))
    (grown,) = inventory.targets
    held = segments_held(machine, [one.process for one in inventory.found])
    return replace(grown, segments=grown.segments | held)


def clear(
    machine: Machine,
    targets: Sequence[Target],
    baseline: Baseline,
    *,
    budgets: Budgets | None = None,
    observer: Observer | None = None,
) -> Clearance:
    """Stop the targets and prove that the machine is as it was before them.

    Ends within ``budgets.total_s`` (plus one look at the machine). Ctrl-C and SIGTERM to Changeover wait
    until it is over. Never raises for what the targets do: what goes wrong is in the clearance.
    """
    with machine.uninterrupted(), machine.watching_gpus():
        return _Changeover(
            machine, targets, baseline, budgets or Budgets(), observer or SilentObserver()
        ).run()


class _Changeover:
    def __init__(
        self,
        machine: Machine,
        targets: Sequence[Target],
        baseline: Baseline,
        budgets: Budgets,
        observer: Observer,
    ) -> None:
        self._machine = machine
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
        self._gpus_answer = True
        self._last_gpus: tuple[tuple[str, float], ...] = ()
        self._inventory: Inventory | None = None

    def run(self) -> Clearance:
        state = stages.begin(self._started_s, self._budgets)
        while state.stage is not Stage.VERIFY:
            facts = self._look(state)
            moved, state = self._decide(state, facts)
            if not moved:
                self._wait(state, facts)
        self._look(state)
        verification = Verification(
            self._machine, self._question(), self._budgets, state.end_s, lambda gpus: self._sample(gpus)
        )
        evidence = verification.evidence()
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
        inventory = take_inventory(self._machine, self._targets, mps_clients=self._mps_clients)
        new = [one for one in inventory.found if one.process.identity not in self._known]
        if new:
            held = segments_held(self._machine, [one.process for one in new])
            self._targets = tuple(replace(one, segments=one.segments | held) for one in inventory.targets)
        else:
            self._targets = inventory.targets
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
            )
            for one in inventory.alive
            if not one.refusal and one.process.identity not in self._denied
        )
        can_drain = any(target.drain is not None for target in self._targets)
        running = self._running() if state.stage is Stage.DRAIN and state.began else None
        return Facts(members, can_drain=can_drain, running=running)

    def _decide(self, state: State, facts: Facts) -> tuple[bool, State]:
        """Step until the machine has to be looked at again."""
        moved = False
        while True:
            step = stages.step(state, facts, self._now_s(), self._budgets)
            for action in step.actions:
                match action:
                    case BeginDrain():
                        self._begin_drain()
                    case ListHolders():
                        self._device_holders = self._machine.holders(_DEVICES)
                    case Signal():
                        self._send(action)
            state = step.state
            if step.left is not None:
                self._leave(step.left, state)
            if step.left is None or step.actions or state.stage in (Stage.VERIFY, Stage.DRAIN):
                return moved or bool(step.actions), state
            moved = True

    def _leave(self, left: stages.Left, state: State) -> None:
        detail = "; ".join((left.detail, *self._drain_notes)) if left.stage is Stage.DRAIN else left.detail
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
        record = SignalRecord(
            pid=order.identity.pid,
            start_ticks=order.identity.start_ticks,
            comm=found.process.comm,
            signal=signal.Signals(order.number).name,
            proof=order.proof.value,
            target=found.target,
        )
        self._observer.intent(record)
        self._signals.append(record)
        if self._machine.signal(handle, order.number) is Delivery.DENIED:
            reason = f"the kernel denied {record.signal}: another user's process"
            self._denied[order.identity] = reason
            self._refusals[Refusal(record.pid, record.start_ticks, record.comm, reason)] = None

    def _begin_drain(self) -> None:
        for target in self._targets:
            if target.drain is not None:
                try:
                    target.drain.begin()
                except Exception as error:  # noqa: BLE001 - nothing may stop a teardown
                    self._drain_notes.append(f"{target.drain.name}: {type(error).__name__}: {error}")

    def _running(self) -> int | None:
        """Requests in all servers together; None as soon as one of them does not say."""
        total = 0
        for target in self._targets:
            if target.drain is not None:
                try:
                    running = target.drain.running()
                except Exception as error:  # noqa: BLE001
                    note = f"{target.drain.name}: {type(error).__name__}: {error}"
                    self._drain_notes = [*dict.fromkeys((*self._drain_notes, note))]
                    running = None
                if running is None:
                    return None
                total += running
        return total

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
        listed = (one for gpu in reading.gpus for one in gpu.processes if one.kind == "mps")
        self._mps_clients = frozenset(one.pid for one in listed)
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
        return Question(self._targets, self._baseline, frozenset(self._known), survivors, self._strangers())

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
