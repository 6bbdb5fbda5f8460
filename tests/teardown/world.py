"""A simulated server for the teardown's tests: a leader, its workers, and a recorder for what is written
down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from changeover.machine.protocol import Delivery
from changeover.machine.simulated import SimulatedMachine
from changeover.machine.simulated_world import SimulatedProcess
from changeover.teardown.budgets import Budgets
from changeover.teardown.clear import MachineSample, clear
from changeover.teardown.clearance import Clearance, Evidence, SignalRecord, StageRecord
from changeover.teardown.footprint import Baseline, Target, take_baseline
from changeover.teardown.launch import Owned, launch

COOKIE = "this-runs-secret"


@dataclass
class Recorder:
    """What was written down, in order; ``intents_before`` counts the signals sent when each intent came."""

    machine: SimulatedMachine
    stages: list[StageRecord] = field(default_factory=list)
    intents: list[SignalRecord] = field(default_factory=list)
    sent_before_intent: list[int] = field(default_factory=list)
    samples: list[MachineSample] = field(default_factory=list)
    deliveries: list[tuple[SignalRecord, Delivery]] = field(default_factory=list)

    def stage(self, record: StageRecord) -> None:
        self.stages.append(record)

    def intent(self, record: SignalRecord) -> None:
        self.intents.append(record)
        self.sent_before_intent.append(len(self.machine.signals))

    def delivered(self, record: SignalRecord, delivery: Delivery) -> None:
        self.deliveries.append((record, delivery))

    def sample(self, sample: MachineSample) -> None:
        self.samples.append(sample)


@dataclass
class Server:
    """A server on a simulated machine, started after the baseline was taken."""

    machine: SimulatedMachine
    baseline: Baseline
    owned: Owned
    target: Target
    recorder: Recorder

    def worker(self, pid: int, **script: object) -> SimulatedProcess:
        """A worker as engines make them: child of the leader, in its session, with its environment."""
        given = {"ppid": self.owned.pid, "sid": self.owned.sid, "cookie": COOKIE, **script}
        return self.machine.add(SimulatedProcess(pid, **given))  # type: ignore[arg-type]

    def leader(self) -> SimulatedProcess:
        return next(one for one in self.machine._processes if one.pid == self.owned.pid)

    def clear(self, **budgets: float) -> Clearance:
        return clear(
            self.machine,
            [self.target],
            self.baseline,
            budgets=Budgets(**budgets),  # type: ignore[arg-type]
            observer=self.recorder,
        )


def start_server(machine: SimulatedMachine, *, ports: tuple[int, ...] = (), **script: object) -> Server:
    baseline = take_baseline(machine)
    machine.on_spawn = lambda pid: SimulatedProcess(pid, comm="server", ports=ports, **script)  # type: ignore[arg-type]
    owned = launch(machine, argv=["server"], env={}, cwd=Path("/"), log=Path("/dev/null"), cookie=COOKIE)
    return Server(machine, baseline, owned, owned.target("server", ports=ports), Recorder(machine))


def evidence(clearance: Clearance, item: str) -> Evidence:
    (one,) = [each for each in clearance.evidence if each.item == item]
    return one
