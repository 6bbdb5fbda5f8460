"""Single judgements: the table of what is said of what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from changeover.machine.gpus import ContextReading, GpuFacts, GpuProcess, GpuReading, Presence
from changeover.machine.ports import PortReading
from changeover.machine.shm import Segment
from changeover.machine.surroundings import Surroundings
from changeover.teardown.budgets import Budgets
from changeover.teardown.clearance import Evidence, Verdict
from changeover.teardown.footprint import Baseline, GpuBaseline
from changeover.teardown.gpu_memory import explain_unlisted, judge_gpu, settled
from changeover.teardown.verify import (
    NewSegments,
    judge_context,
    judge_files,
    judge_port,
    judge_presence,
    judge_segments,
    sort_segments,
)

BUDGETS = Budgets()
BEFORE = GpuBaseline("GPU-0", "H200", used_mib=4.0, memory_call="v2", pids=(300,))
GPU = GpuFacts("GPU-0", 0, "H200", 143_771.0, 4.0, 615.0, "v2", persistence=True, processes=())


def samples(*used_mib: float) -> list[GpuFacts]:
    return [replace(GPU, used_mib=used) for used in used_mib]


@pytest.mark.parametrize(
    ("used_mib", "is_settled"),
    [
        ((4.0, 4.0, 4.0), True),
        ((0.0, 0.0, 0.0), True),
        ((4.0, 4.0), False),
        ((900.0, 4.0, 4.0), False),
        ((4.0, 4.0, 900.0), False),
        ((900.0, 4.0, 4.0, 4.0), True),
        ((35.0, 20.0, 4.0), False),
        ((35.0, 35.5, 35.9), True),
        ((36.1, 36.1, 36.1), False),
    ],
)
def test_settled_is_k_samples_at_the_baseline_and_no_longer_falling(
    used_mib: tuple[float, ...], is_settled: bool
) -> None:
    assert settled(samples(*used_mib), BEFORE, BUDGETS) is is_settled


def judged(used_mib: float, *listed: int, strangers: tuple[int, ...] = (), **more: bool) -> Evidence | None:
    processes = tuple(GpuProcess(pid, 1.0, "compute") for pid in listed)
    return judge_gpu(
        [replace(one, processes=processes) for one in samples(used_mib, used_mib, used_mib)],
        BEFORE,
        {pid: f"pid {pid} (stranger)" for pid in strangers},
        frozenset({77}),
        32768,
        BUDGETS,
        {},
        None,
        patience_spent=more.get("patience_spent", False),
        expired=more.get("expired", False),
    )


def verdict(evidence: Evidence | None) -> Verdict:
    assert evidence is not None
    return evidence.verdict


def test_the_table_of_a_gpu() -> None:
    assert verdict(judged(4.0)) is Verdict.CLEAN
    assert verdict(judged(4.0, 300)) is Verdict.CLEAN
    assert judged(4.0, 77) is None
    assert verdict(judged(4.0, 77, expired=True)) is Verdict.DIRTY
    assert judged(900.0) is None
    assert verdict(judged(900.0, expired=True)) is Verdict.DIRTY
    assert judged(900.0, 50, strangers=(50,)) is None
    assert verdict(judged(900.0, 50, strangers=(50,), patience_spent=True)) is Verdict.FOREIGN_HOLDER
    assert verdict(judged(900.0, 51, expired=True)) is Verdict.FOREIGN_HOLDER
    assert verdict(judged(900.0, 2**31, expired=True)) is Verdict.UNVERIFIED
    assert verdict(judged(900.0, 0, expired=True)) is Verdict.UNVERIFIED
    assert verdict(judged(900.0, 77, 50, strangers=(50,), expired=True)) is Verdict.DIRTY


def test_what_could_hold_memory_that_nobody_is_listed_for_is_excluded_or_not() -> None:
    steady = samples(900.0, 900.0, 900.0)
    own = explain_unlisted(steady, Surroundings(True, True, (), False))
    for said in (
        "namespace: excluded",
        "close: unlikely",
        "MPS server: excluded",
        "excluded (root)",
        "no such node",
    ):
        assert said in own
    sick = [replace(one, mig=True, health=("a row remap is pending",)) for one in samples(900.0, 800.0)]
    other = explain_unlisted(sick, Surroundings(False, True, (41,), True))
    for said in (
        "possible: this is a container",
        "still changing",
        "pids [41]",
        "MIG",
        "a memory node",
        "row remap",
    ):
        assert said in other
    assert "possible: not root" in explain_unlisted(steady, Surroundings(None, False, (), False))


def test_what_a_stranger_gives_back_does_not_hide_our_leftover() -> None:
    """A job beside ours ends during the teardown: the baseline is 70 GiB too generous from then on."""
    before = replace(BEFORE, used_mib=70_004.0, shares=((300, 70_000.0), (301, 0.0)))
    there = replace(GPU, used_mib=70_004.0, processes=(GpuProcess(300, 70_000.0, "compute"),))
    ended = replace(GPU, used_mib=60_004.0)
    grown = replace(there, processes=(GpuProcess(300, 75_000.0, "compute"),), used_mib=75_004.0)
    assert before.allowed_mib(there) == 70_004.0 == before.allowed_mib(grown)
    assert before.allowed_mib(ended) == 4.0
    for reading, said_verdict in ((there, Verdict.CLEAN), (ended, Verdict.DIRTY), (GPU, Verdict.CLEAN)):
        said = judge_gpu(
            [reading] * 3, before, {}, frozenset(), 9, BUDGETS, {}, None, patience_spent=False, expired=True
        )
        assert verdict(said) is said_verdict
    assert "70004 less what others gave back" in said.expected  # type: ignore[union-attr]


def test_on_amd_a_context_without_a_process_is_suspected_and_mps_is_not() -> None:
    """ROCm/aiter #2061: a zombie's or a killed rank's KFD context keeps its memory."""
    amd = [replace(one, vendor="amd", memory_call="amdsmi") for one in samples(900.0, 900.0)]
    said = explain_unlisted(amd, Surroundings(True, True, (41,), True))
    assert "context without a process: possible" in said and "MPS" not in said and "NUMA" not in said


def test_readings_by_different_calls_are_not_compared() -> None:
    old = [replace(GPU, memory_call="v1", used_mib=615.0)]
    said = judge_gpu(old, BEFORE, {}, frozenset(), 9, BUDGETS, {}, None, patience_spent=False, expired=False)
    assert verdict(said) is Verdict.UNVERIFIED


def presence(before: Presence, now: Presence, *, same: bool = True) -> Verdict | None:
    gpus = (BEFORE,) if before is Presence.READ else ()
    baseline = Baseline(before, gpus, frozenset(), "boot", 0.0)
    present = (GPU,) if now is Presence.READ and same else ()
    said = judge_presence(baseline, GpuReading(now, present))
    return None if said is None else said.verdict


def test_the_table_of_presence() -> None:
    assert presence(Presence.ABSENT, Presence.ABSENT) is Verdict.CLEAN
    assert presence(Presence.READ, Presence.READ) is None
    assert presence(Presence.READ, Presence.READ, same=False) is Verdict.UNVERIFIED
    assert presence(Presence.READ, Presence.ABSENT) is Verdict.UNVERIFIED
    assert presence(Presence.READ, Presence.UNREADABLE) is Verdict.UNVERIFIED
    assert presence(Presence.UNREADABLE, Presence.READ) is Verdict.UNVERIFIED


def port(
    reading: PortReading, *owners: str, patience_spent: bool = False, expired: bool = False
) -> Evidence | None:
    return judge_port(reading, owners, patience_spent=patience_spent, expired=expired)


def test_the_table_of_a_port() -> None:
    free, taken = PortReading(1, True, ""), PortReading(1, False, "EADDRINUSE")
    assert verdict(port(free)) is Verdict.CLEAN
    assert port(taken) is None and port(taken, "pid 5") is None
    assert verdict(port(taken, "pid 5", patience_spent=True)) is Verdict.FOREIGN_HOLDER
    assert port(taken, patience_spent=True) is None
    assert verdict(port(taken, expired=True)) is Verdict.DIRTY
    assert verdict(port(PortReading(1, False, "EACCES"))) is Verdict.UNVERIFIED


OLD, OURS, HELD, NOBODYS = (Segment(f"/dev/shm/{name}", 1) for name in ("old", "ours", "held", "nobodys"))


def test_segments_are_sorted_by_whose_they_are() -> None:
    new = sort_segments(
        frozenset({OLD, OURS, HELD, NOBODYS}),
        frozenset({OLD}),
        frozenset({OLD, OURS, HELD}),
        {HELD: ("pid 5",)},
    )
    assert new == NewSegments(frozenset({OURS}), {HELD: ("pid 5",)}, frozenset({NOBODYS}))


def test_a_new_file_under_an_old_name_is_new() -> None:
    again = Segment(OLD.path, 2)
    assert sort_segments(frozenset({again}), frozenset({OLD}), frozenset(), {}).nobodys == {again}


def test_the_table_of_segments() -> None:
    nothing = NewSegments(frozenset(), {HELD: ("pid 5",)}, frozenset())
    left = NewSegments(frozenset(), {}, frozenset({NOBODYS}))
    assert verdict(judge_segments(nothing, [OURS], expired=False)) is Verdict.CLEAN
    assert judge_segments(left, [], expired=False) is None
    assert verdict(judge_segments(left, [], expired=True)) is Verdict.DIRTY


def test_the_table_of_contexts_and_files() -> None:
    assert verdict(judge_context(ContextReading("G", True, True, 0.1, ""))) is Verdict.CLEAN
    assert verdict(judge_context(ContextReading("G", False, True, 0.0, "cuInit: 3"))) is Verdict.DIRTY
    assert verdict(judge_context(ContextReading("G", False, False, 9.0, "no answer"))) is Verdict.UNVERIFIED
    assert verdict(judge_files([], expired=False)) is Verdict.CLEAN
    assert judge_files(["pid 5"], expired=False) is None
    assert verdict(judge_files(["pid 5"], expired=True)) is Verdict.FOREIGN_HOLDER
