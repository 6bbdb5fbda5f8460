"""What is written down comes back the same, and holds no secret."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from changeover.machine.errors import InvalidInput
from changeover.machine.gpus import GpuProcess, Presence
from changeover.machine.simulated import SimulatedMachine
from changeover.machine.simulated_world import SimulatedGpu, SimulatedProcess
from changeover.teardown.budgets import Budgets
from changeover.teardown.clearance import EXIT_CODES, Clearance, Verdict, overall
from changeover.teardown.footprint import Baseline, Target, take_baseline
from changeover.teardown.late_baseline import take_late_baseline
from changeover.teardown.launch import launch
from tests.teardown.world import COOKIE, start_server


def test_a_baseline_survives_its_json() -> None:
    gpu = SimulatedGpu("GPU-0", idle_mib=4.0, listed=(GpuProcess(300, None, "graphics"),))
    machine = SimulatedMachine(gpus=[gpu])
    machine.add_segment("/dev/shm/x", inode=9)
    baseline = take_baseline(machine)
    assert baseline.gpus[0].used_mib == 4.0 and baseline.gpus[0].pids == (300,)
    assert Baseline.from_json(baseline.to_json()) == baseline


def test_a_target_survives_its_json_and_hides_its_secret() -> None:
    target = start_server(SimulatedMachine(), ports=(8000,)).target
    assert Target.from_json(target.to_json(), cookie=COOKIE) == target
    assert COOKIE not in str(target.to_json()) and COOKIE not in repr(target)


@pytest.mark.parametrize("damaged", [{}, {"presence": "perhaps"}, {"leader": 3}])
def test_a_damaged_record_is_said(damaged: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="a baseline"):
        Baseline.from_json(damaged)
    with pytest.raises(InvalidInput, match="a target"):
        Target.from_json(damaged, cookie="x")
    with pytest.raises(InvalidInput, match="a clearance"):
        Clearance.from_json(damaged)


def test_a_late_baseline_is_what_others_hold_never_what_is_in_use() -> None:
    assert take_late_baseline(SimulatedMachine(), ()).presence is Presence.ABSENT
    machine = SimulatedMachine(gpus=[SimulatedGpu("GPU-0"), SimulatedGpu("GPU-1")])
    machine.add(SimulatedProcess(700, gpu_mib={"GPU-0": 900.0}))
    machine.add(SimulatedProcess(701, gpu_mib={"GPU-0": 100.0, "GPU-1": 100.0}))
    ours = machine.process(700)
    assert ours is not None
    target = Target("t", cookie="x", leader=ours.identity, sid=None, members=frozenset({ours.identity}))
    taken = take_late_baseline(machine, (target,))
    assert {gpu.uuid: (gpu.used_mib, gpu.pids) for gpu in taken.gpus} == {
        "GPU-0": (100.0, (701,)),
        "GPU-1": (100.0, (701,)),
    }


def test_where_the_driver_does_not_tell_a_strangers_share_there_is_no_baseline() -> None:
    unknown = GpuProcess(701, None, "compute")
    machine = SimulatedMachine(gpus=[SimulatedGpu("GPU-0", listed=(unknown,)), SimulatedGpu("GPU-1")])
    taken = take_late_baseline(machine, ())
    assert [gpu.uuid for gpu in taken.gpus] == ["GPU-1"] and "does not tell" in taken.note


ORDER = [Verdict.UNKILLABLE, Verdict.DIRTY, Verdict.FOREIGN_HOLDER, Verdict.UNVERIFIED, Verdict.CLEAN]


@pytest.mark.parametrize(("worse", "better"), list(itertools.combinations(ORDER, 2)))
def test_the_worst_item_is_the_verdict(worse: Verdict, better: Verdict) -> None:
    assert overall([better, worse, better]) is worse


def test_nothing_looked_at_is_nothing_verified() -> None:
    assert overall([]) is Verdict.UNVERIFIED


def test_exit_codes_are_the_contract() -> None:
    assert {verdict.value: code for verdict, code in EXIT_CODES.items()} == {
        "clean": 0,
        "unkillable": 3,
        "dirty": 4,
        "foreign_holder": 5,
        "unverified": 6,
    }


def test_budgets_that_cannot_be() -> None:
    for wrong in ({"total_s": 0.0}, {"sample_s": 0.0}, {"clean_samples": 0}):
        with pytest.raises(InvalidInput, match="total_s > 0"):
            Budgets(**wrong)


def test_launch_marks_the_environment_and_hides_the_secret(tmp_path: Path) -> None:
    seen: dict[str, str] = {}

    class Watching(SimulatedMachine):
        def spawn(self, argv, *, env, cwd, log, cgroup=None):  # type: ignore[no-untyped-def]
            seen.update(env)
            return super().spawn(argv, env=env, cwd=cwd, log=log, cgroup=cgroup)

    owned = launch(
        Watching(),
        argv=["x"],
        env={"NCCL_PROTO": "LL"},
        cwd=tmp_path,
        log=tmp_path / "a" / "log",
        cookie=COOKIE,
    )
    assert seen["SPT_NOENV"] == "1" and seen["CHANGEOVER_COOKIE"] == COOKIE and seen["NCCL_PROTO"] == "LL"
    assert "PATH" in seen, "added to our own environment"
    assert COOKIE not in repr(owned) and owned.sid == owned.pid


def test_launching_what_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    from changeover.machine.local import LocalMachine

    with pytest.raises(InvalidInput, match="/nowhere/sglang"):
        launch(
            LocalMachine(),
            argv=["/nowhere/sglang"],
            env={},
            cwd=tmp_path,
            log=tmp_path / "log",
            cookie=COOKIE,
        )
