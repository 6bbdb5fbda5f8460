"""The judgement on one GPU's memory, and the explanation of memory that nobody is listed for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from changeover.machine.gpus import GpuFacts
from changeover.machine.surroundings import Surroundings
from changeover.teardown.budgets import Budgets
from changeover.teardown.clearance import Evidence, Verdict
from changeover.teardown.footprint import GpuBaseline

_STILL_FALLING_MIB = 1.0
_IMPORTED_MIB = 64.0  # a stranger's list entry grows by less when he merely works on


def settled(samples: Sequence[GpuFacts], before: GpuBaseline, budgets: Budgets) -> bool:
    """K samples in a row at the baseline and no longer falling: one clean one may be a dip (llm-d #720)."""
    last = samples[-budgets.clean_samples :]
    return (
        len(last) == budgets.clean_samples
        and all(one.used_mib <= before.allowed_mib(one) + budgets.tolerance_mib for one in last)
        and all(one.used_mib > earlier.used_mib - _STILL_FALLING_MIB for earlier, one in pairwise(last))
    )


def judge_gpu(
    samples: Sequence[GpuFacts],
    before: GpuBaseline | None,
    strangers: Mapping[int, str],
    ours: frozenset[int],
    pid_max: int,
    budgets: Budgets,
    shares_before: Mapping[int, float],
    surroundings: Surroundings | None,
    *,
    patience_spent: bool,
    expired: bool,
) -> Evidence | None:
    """One GPU against its own baseline; a sum over GPUs would hide a dirty one (LMCache #4851).

    ``strangers`` are the driver's pids that ``/proc`` shows here, described; ``ours`` the pids of the targets;
    ``shares_before`` MiB by pid while the targets lived. A pid from the driver is never a reason to signal anybody: it
    may be another namespace's (nvidia-docker #1483).
    """
    last = samples[-1]
    item = f"gpu:{last.uuid}"
    if before is None:
        return Evidence(item, Verdict.UNVERIFIED, "a baseline from before the phase", "a GPU that had none")
    allowed_mib = before.allowed_mib(last)
    ended = "" if allowed_mib == before.used_mib else f", {before.used_mib:.0f} less what others gave back"
    expected = f"{allowed_mib:.0f} MiB (before the phase{ended}), {budgets.clean_samples} samples in a row"
    seen = f"{last.used_mib:.0f} MiB"
    if before.memory_call != last.memory_call:
        seen = f"memory read by {last.memory_call}, the baseline by {before.memory_call}"
        return Evidence(item, Verdict.UNVERIFIED, expected, seen)
    listed = {process.pid for process in last.processes} - set(before.pids)
    mine = sorted(listed & ours)
    if settled(samples, before, budgets) and not mine:
        return Evidence(item, Verdict.CLEAN, expected, f"{seen}, none of ours listed", _beside(last, before))
    importers = _importers(last, shares_before, strangers)
    foreign = [strangers[pid] for pid in sorted(listed - ours) if pid in strangers]
    if (foreign or importers) and not mine and (patience_spent or expired):
        held = "; ".join(
            (*importers, *(one for one in foreign if not any(one in said for said in importers)))
        )
        return Evidence(item, Verdict.FOREIGN_HOLDER, expected, f"{seen}, used by {held}")
    if not expired:
        return None
    if mine:
        return Evidence(item, Verdict.DIRTY, expected, f"{seen}, driver still lists ours: {mine}")
    hidden = sorted(pid for pid in listed - ours if pid not in strangers and 0 < pid < pid_max)
    if hidden:
        note = "not in this PID namespace: another container or a host process"
        return Evidence(item, Verdict.FOREIGN_HOLDER, expected, f"{seen}, listed for pids {hidden}", note)
    nonsense = sorted(pid for pid in listed if not 0 < pid < pid_max)
    if nonsense:
        return Evidence(item, Verdict.UNVERIFIED, expected, f"{seen}, impossible pids listed: {nonsense}")
    note = "no process listed" if surroundings is None else explain_unlisted(samples, surroundings)
    return Evidence(item, Verdict.DIRTY, expected, seen, note)


def _importers(
    last: GpuFacts, shares_before: Mapping[int, float], strangers: Mapping[int, str]
) -> tuple[str, ...]:
    """Strangers whose share has grown since ours lived.

    Memory that ours exported by CUDA IPC stays while somebody has it open, and only when the exporter is dead does the
    driver charge it to him (measured on an H200, driver 580).
    """
    found = []
    for process in last.processes:
        grown = (process.used_mib or 0.0) - shares_before.get(process.pid, 0.0)
        if process.pid in strangers and process.pid in shares_before and grown >= _IMPORTED_MIB:
            reason = (
                f"{grown:.0f} MiB more since ours ended: memory that ours exported (CUDA IPC), or its own"
            )
            found.append(f"{strangers[process.pid]} ({reason})")
    return tuple(found)


def _beside(last: GpuFacts, before: GpuBaseline) -> str:
    said = []
    others = sorted({process.pid for process in last.processes} - set(before.pids))
    if others:
        said.append(f"others listed: {others}")
    if before.persistence is not None and last.persistence != before.persistence:
        said.append(f"persistence mode was {before.persistence}, is {last.persistence}")
    return "; ".join(said)


def explain_unlisted(samples: Sequence[GpuFacts], around: Surroundings) -> str:
    """Why memory is in use and nobody is listed: what is excluded and what is not, each with its reason.

    A process of another PID namespace is left out of the list by the driver (535.113 and later); a close may be
    deferred to a kernel thread, after the process is gone (``nvidia_close``); memory of a GPU that is a NUMA node may
    stay in the page cache (NVML's note on GH200).
    """
    last = samples[-1]
    steady = sum(abs(one.used_mib - last.used_mib) < _STILL_FALLING_MIB for one in samples)
    could = {
        "another PID namespace": {
            True: "excluded (this is the machine's own)",
            False: "possible: this is a container; look on the host",
            None: "possible: the kernel does not say in which this is",
        }[around.initial_pid_namespace],
        "deferred close": f"unlikely (the same in the last {steady} of {len(samples)} samples)"
        if steady > 1
        else "possible: it is still changing; look again",
        "lack of permission": ("possible: MIG hides other instances" if last.mig else "excluded (root)")
        if around.root
        else "possible: not root",
        "fault": f"possible: {'; '.join(last.health)}" if last.health else "none reported",
        **(_ONLY_AMD if last.vendor == "amd" else _only_nvidia(around)),
    }
    return "no process listed; " + "; ".join(f"{what}: {why}" for what, why in could.items())


# A rank that was killed in the middle of HIP, or a zombie, keeps its context and memory (ROCm/aiter #2061, mori #473).
_ONLY_AMD = {
    "context without a process": "possible: a zombie's ends with its parent, another only with a reboot"
}


def _only_nvidia(around: Surroundings) -> dict[str, str]:
    mps, node = around.mps_pids, around.memory_only_node
    return {
        "MPS server": f"possible: pids {list(mps)}" if mps else "excluded (none runs here)",
        "NUMA page cache": "possible: a memory node without processors"
        if node
        else "excluded (no such node)",
    }
