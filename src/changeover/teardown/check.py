"""Is the machine clean now? Looks at everything, changes nothing, and needs no baseline."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from changeover.machine.gpus import GpuFacts, Presence
from changeover.machine.processes import ProcessFacts, ProcessIdentity
from changeover.machine.protocol import Holder, Machine
from changeover.machine.shm import SHM_ROOT, Segment, is_segment
from changeover.teardown.budgets import Budgets
from changeover.teardown.clearance import Clearance, Evidence, Verdict, overall
from changeover.teardown.inventory import describe
from changeover.teardown.verify import judge_absence, judge_health

_SHM = f"{SHM_ROOT}/"
_AMD_IDLE_MIB = (
    512.0  # its figure holds what the driver keeps for itself; a guess, where a clear has a baseline
)
# Names that engines and their libraries give; a leftover of one of them that nobody holds is a dead server's.
# Only ever a reason to name a segment, never to remove it.
_ENGINE_SEGMENTS = (
    "psm_",
    "sem.mp-",
    "sem.loky-",
    "nccl-",
    "sgl_shm_",
    "sglang_",
    "vllm_",
    "cuda.shm.",
    "torch_",
)


def check_machine(machine: Machine, *, budgets: Budgets | None = None) -> Clearance:
    """The state now, as evidence: runs alive, their ports, GPUs, device holders, segments."""
    budgets = budgets or Budgets()
    started_s = machine.clock.monotonic()
    marked = {
        process.identity: process
        for process in machine.processes().values()
        if process.pid != machine.pid and process.alive and machine.cookie(process.pid) is not None
    }
    reading = machine.gpus(budgets.probe_s)
    segments = frozenset(machine.segments())
    listeners = {f"socket:[{one.inode}]": one for one in machine.listeners()}
    holders = machine.holders((*listeners, _SHM, "/dev/nvidia", "/dev/kfd", "/dev/dri/renderD"))
    ports: dict[int, set[ProcessIdentity]] = {}
    held: dict[Segment, set[ProcessIdentity]] = {}
    devices: set[ProcessIdentity] = set()
    for holder in holders:
        path = holder.held.path
        if path in listeners:
            ports.setdefault(listeners[path].port, set()).add(holder.identity)
        elif path.startswith(_SHM):
            for segment in segments:
                if is_segment(holder.held, segment):
                    held.setdefault(segment, set()).add(holder.identity)
        elif _is_device(holder) and holder.identity.pid != machine.pid:
            devices.add(holder.identity)
    evidence = [_runs(machine, marked)]
    evidence += [
        Evidence(
            f"port:{port}",
            Verdict.FOREIGN_HOLDER,
            "no port of a run",
            f"listened on by {_names(machine, owners)}",
        )
        for port, owners in sorted(ports.items())
        if owners & set(marked)
    ]
    evidence += list(_segments(machine, segments, held))
    if reading.presence is Presence.UNREADABLE:
        evidence.append(Evidence("gpus", Verdict.UNVERIFIED, "the driver answers", reading.note))
    elif reading.presence is Presence.ABSENT:
        evidence.append(judge_absence(reading, "free GPUs, if any"))
    else:
        note = "none" if not devices else _names(machine, devices)
        evidence.append(Evidence("devices", Verdict.CLEAN, "holders named", note))
        for gpu in reading.gpus:
            idle_mib = _AMD_IDLE_MIB if gpu.vendor == "amd" else budgets.tolerance_mib
            evidence += [_gpu(machine, gpu, idle_mib), judge_health(gpu)]
    return Clearance(
        verdict=overall(one.verdict for one in evidence),
        evidence=tuple(evidence),
        stages=(),
        signals=(),
        refusals=(),
        seconds=machine.clock.monotonic() - started_s,
    )


def _runs(machine: Machine, marked: Mapping[ProcessIdentity, ProcessFacts]) -> Evidence:
    note = "" if os.geteuid() == 0 else "not root: other users' environments and files cannot be read"
    if not marked:
        return Evidence("runs", Verdict.CLEAN, "no process of a run", "none", note)
    return Evidence("runs", Verdict.FOREIGN_HOLDER, "no process of a run", _names(machine, set(marked)), note)


def _segments(
    machine: Machine, present: frozenset[Segment], held: Mapping[Segment, set[ProcessIdentity]]
) -> Iterator[Evidence]:
    expected = "no engine's segment without a holder"
    unheld = sorted(segment.path for segment in present - set(held))
    engines = [path for path in unheld if path.rsplit("/", 1)[-1].startswith(_ENGINE_SEGMENTS)]
    notes = [f"{segment.path} held by {_names(machine, who)}" for segment, who in sorted(held.items())]
    notes += [f"{path} held by nobody" for path in unheld if path not in engines]
    if engines:
        yield Evidence("shared-memory", Verdict.DIRTY, expected, ", ".join(engines), "; ".join(notes))
    else:
        yield Evidence("shared-memory", Verdict.CLEAN, expected, f"{len(present)} segments", "; ".join(notes))


def _gpu(machine: Machine, gpu: GpuFacts, idle_mib: float) -> Evidence:
    item, expected = f"gpu:{gpu.uuid}", f"at most {idle_mib:.0f} MiB, no process listed"
    seen = f"{gpu.name}: {gpu.used_mib:.0f} of {gpu.total_mib:.0f} MiB"
    if gpu.processes:
        listed = ", ".join(f"{one.kind} {_listed(machine, one.pid)}" for one in gpu.processes)
        return Evidence(item, Verdict.FOREIGN_HOLDER, expected, f"{seen}, used by {listed}")
    if gpu.used_mib > idle_mib:
        return Evidence(item, Verdict.DIRTY, expected, f"{seen}, no process listed")
    return Evidence(item, Verdict.CLEAN, expected, seen)


def _listed(machine: Machine, pid: int) -> str:
    process = machine.process(pid)
    return describe(machine, process.identity) if process else f"pid {pid} (not in this PID namespace)"


def _is_device(holder: Holder) -> bool:
    return holder.held.path.startswith("/dev/") and not holder.held.path.startswith("/dev/shm/")  # noqa: S108


def _names(machine: Machine, identities: set[ProcessIdentity]) -> str:
    return "; ".join(describe(machine, identity) for identity in sorted(identities))
