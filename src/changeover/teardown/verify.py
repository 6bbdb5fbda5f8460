"""Judgements on what is left: facts in, evidence out, nothing read.

A judgement that may still get better by waiting answers None until ``expired``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from changeover.machine.gpus import NO_GPU, ContextReading, GpuFacts, GpuReading, Presence
from changeover.machine.ports import PortReading
from changeover.machine.processes import ProcessFacts, ProcessIdentity
from changeover.machine.shm import Segment
from changeover.teardown.clearance import Evidence, Verdict
from changeover.teardown.footprint import Baseline

Describe = Callable[[ProcessIdentity], str]


@dataclass(frozen=True)
class Survivor:
    """A process of ours that is still alive; ``reason`` says why nothing more can be done."""

    process: ProcessFacts
    reason: str


def judge_processes(
    known: int, survivors: Sequence[Survivor], unreaped: Sequence[tuple[ProcessFacts, str]]
) -> Evidence:
    """All of ours gone; a true zombie is gone too, and named with the parent that has not looked."""
    note = "; ".join(f"{_named(zombie)} unreaped by {parent}" for zombie, parent in unreaped)
    if not survivors:
        return Evidence("processes", Verdict.CLEAN, "none of ours alive", f"{known} known, none alive", note)
    said = (f"{_named(one.process)} in state {one.process.state}: {one.reason}" for one in survivors)
    seen = "; ".join(said)
    return Evidence("processes", Verdict.UNKILLABLE, "none of ours alive", seen, note)


def judge_port(
    reading: PortReading, owners: Sequence[str], *, patience_spent: bool, expired: bool
) -> Evidence | None:
    """Free when a server could bind it; held by a stranger or by nobody visible otherwise."""
    item, expected = f"port:{reading.port}", "bindable with SO_REUSEADDR on every address"
    if reading.bindable:
        return Evidence(item, Verdict.CLEAN, expected, "bindable")
    if reading.reason not in ("EADDRINUSE", "EADDRNOTAVAIL"):
        return Evidence(item, Verdict.UNVERIFIED, expected, f"{reading.reason} on binding")
    if owners and (patience_spent or expired):
        return Evidence(item, Verdict.FOREIGN_HOLDER, expected, f"listened on by {'; '.join(owners)}")
    if expired:
        note = "another network namespace or user, or a connection that the kernel has not let go"
        return Evidence(item, Verdict.DIRTY, expected, f"{reading.reason}, no owner visible", note)
    return None


def judge_presence(baseline: Baseline, reading: GpuReading) -> Evidence | None:
    """Whether the GPUs can be judged one by one (None), or what there is to say instead."""
    missing = set(baseline.by_uuid()) - set(reading.by_uuid())
    seen = f"missing: {sorted(missing)}" + (f" ({reading.note})" if reading.note else "")
    if reading.presence is Presence.UNREADABLE:
        return Evidence("gpus", Verdict.UNVERIFIED, "the driver answers", reading.note)
    if baseline.presence is Presence.UNREADABLE:
        return Evidence("gpus", Verdict.UNVERIFIED, "a baseline", f"none could be taken: {baseline.note}")
    if missing:
        return Evidence("gpus", Verdict.UNVERIFIED, "the GPUs of the baseline", seen)
    if reading.presence is Presence.ABSENT:
        return judge_absence(reading, "no GPU, as before the phase")
    return None


def judge_absence(reading: GpuReading, expected: str) -> Evidence:
    """No GPU is nothing to verify; one that was left out is named."""
    left_out = reading.note if reading.note != NO_GPU.note else ""
    return Evidence("gpus", Verdict.CLEAN, expected, NO_GPU.note, left_out)


def judge_health(gpu: GpuFacts) -> Evidence:
    """A GPU that asks for a reset is no place for the next phase, whatever its memory says."""
    expected = "no pending remap, no recovery action" if gpu.vendor == "nvidia" else "no pending bad page"
    if gpu.health:
        return Evidence(f"health:{gpu.uuid}", Verdict.UNVERIFIED, expected, "; ".join(gpu.health))
    return Evidence(f"health:{gpu.uuid}", Verdict.CLEAN, expected, "healthy")


def judge_context(reading: ContextReading) -> Evidence:
    item, expected = f"context:{reading.uuid}", "a fresh context, memory taken and given back"
    if reading.ok:
        return Evidence(item, Verdict.CLEAN, expected, f"made and destroyed in {reading.seconds:.2f} s")
    if not reading.answered:
        return Evidence(item, Verdict.UNVERIFIED, expected, reading.note)
    return Evidence(item, Verdict.DIRTY, expected, reading.note)


@dataclass(frozen=True)
class NewSegments:
    """What is in ``/dev/shm`` and was not before the phase, sorted by whose it is."""

    removable: frozenset[Segment]  # seen held by a process of ours, and held by nobody now
    held: Mapping[Segment, tuple[str, ...]]  # by living processes, described
    nobodys: frozenset[Segment]


def sort_segments(
    now: frozenset[Segment],
    baseline: frozenset[Segment],
    proven: frozenset[Segment],
    holders: Mapping[Segment, tuple[str, ...]],
) -> NewSegments:
    """Only what was seen in the hands of one of ours may be removed, and only when nobody has it any more."""
    new = now - baseline
    unheld = new - set(holders)
    return NewSegments(
        removable=frozenset(unheld & proven),
        held={segment: who for segment, who in holders.items() if segment in new},
        nobodys=frozenset(unheld - proven),
    )


def judge_segments(new: NewSegments, removed: Sequence[Segment], *, expired: bool) -> Evidence | None:
    """The set as before the phase; a segment that a stranger holds is the stranger's and stays."""
    item, expected = "shared-memory", "the same set as before the phase"
    notes = [f"removed, seen held by ours: {segment.path}" for segment in sorted(removed)]
    notes += [f"{segment.path} held by {', '.join(who)}" for segment, who in sorted(new.held.items())]
    left = sorted(segment.path for segment in new.nobodys | new.removable)
    if not left:
        return Evidence(item, Verdict.CLEAN, expected, "nothing of ours left", "; ".join(notes))
    if not expired:
        return None
    notes.append("held by nobody and never seen in the hands of a process of ours, so not removed")
    return Evidence(item, Verdict.DIRTY, expected, f"new: {', '.join(left)}", "; ".join(notes))


def judge_files(writers: Sequence[str], *, expired: bool) -> Evidence | None:
    """Nobody writes where the phase wrote: what the next phase reads is final."""
    item, expected = "files", "no writer below the phase's folders"
    if not writers:
        return Evidence(item, Verdict.CLEAN, expected, "no writer")
    if not expired:
        return None
    return Evidence(item, Verdict.FOREIGN_HOLDER, expected, f"open for writing by {'; '.join(writers)}")


def judge_devices(strangers: Sequence[str]) -> Evidence:
    """Who else has a GPU's device file open: named, never signalled; memory decides whether it is in the
    way.
    """
    note = "; ".join(strangers)
    seen = f"{len(strangers)} other processes have a device file open" if strangers else "none"
    return Evidence("devices", Verdict.CLEAN, "none of ours holds a GPU's device file", seen, note)


def _named(process: ProcessFacts) -> str:
    return f"pid {process.pid} ({process.comm})"
