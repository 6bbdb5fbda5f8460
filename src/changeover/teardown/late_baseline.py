"""The baseline of a machine on which the server to be cleared runs already: what would be there without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from changeover.machine.gpus import GpuFacts, GpuReading, Presence
from changeover.machine.protocol import Machine
from changeover.teardown.footprint import Baseline, GpuBaseline, Target, shares_of
from changeover.teardown.inventory import take_inventory
from changeover.teardown.leftovers import held_by

_PROBE_TIMEOUT_S = 10.0


def take_late_baseline(machine: Machine, targets: Sequence[Target]) -> Baseline:
    """Per GPU what the driver says that strangers hold, 0 MiB where it lists none: never what is in use now, which
    would call a leftover clean. In ``/dev/shm`` the present set without what the targets hold or are known to have
    held.

    A GPU whose share of a stranger the driver does not tell (MIG, some containers) has no baseline, and is unverified.
    """
    reading = machine.gpus(_PROBE_TIMEOUT_S)
    # Whoever is proven a target's now, not only those on record: a worker born since is no stranger.
    ours = {one.process.pid: one.process for one in take_inventory(machine, targets).found}
    held = held_by(machine, ours.values()).segments
    known = frozenset().union(*(target.segments for target in targets))
    beside = [_without(gpu, frozenset(ours)) for gpu in reading.gpus]
    told = tuple(gpu for gpu in beside if gpu is not None)
    return Baseline(
        presence=reading.presence,
        gpus=told,
        segments=frozenset(machine.segments()) - held - known,
        boot_id=machine.boot_id,
        taken_wall_s=machine.clock.wall(),
        note=_note(reading, untold=len(beside) - len(told)),
    )


def _note(reading: GpuReading, *, untold: int) -> str:
    if reading.presence is not Presence.READ:
        return reading.note
    note = "taken while the server ran: what the driver lists for others"
    return note + "; it does not tell every other process's share" if untold else note


def _without(gpu: GpuFacts, ours: frozenset[int]) -> GpuBaseline | None:
    beside = replace(gpu, processes=tuple(one for one in gpu.processes if one.pid not in ours))
    shares = shares_of(beside)
    if any(one.pid not in shares for one in beside.processes):
        return None
    return GpuBaseline(
        uuid=gpu.uuid,
        name=gpu.name,
        used_mib=sum(shares.values()),
        memory_call=gpu.memory_call,
        pids=tuple(sorted(shares)),
        persistence=gpu.persistence,
        shares=tuple(sorted(shares.items())),
    )
