"""Journals as real runs write them, built in code: a run that finished, failed, was interrupted, resumed."""

from __future__ import annotations

import math
from typing import Any

from changeover.bench.compare import compare
from changeover.pipeline.journal import Event
from changeover.teardown.clearance import (
    Clearance,
    Evidence,
    Refusal,
    SignalRecord,
    StageRecord,
    Verdict,
)

WALL = 1_780_000_000.0
HOSTILE = "<script>alert('prompt')</script> & \"quotes\" </pre>"
BOOT = "7c0e1f34-aaaa-4bbb-8ccc-0123456789ab"


class Recorder:
    """Writes events on a clock that the scenario moves."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now_s = 0.0
        self.wall = WALL
        self.mono = 5000.0
        self.phase_began_s = 0.0

    def say(self, event: str, after_s: float = 0.0, /, **data: Any) -> None:
        self.now_s += after_s
        self.wall += after_s
        self.mono += after_s
        self.events.append(Event(len(self.events), self.wall, self.mono, event, data))

    def reboot(self, down_s: float) -> None:
        """The machine goes away; the monotonic clock starts anew."""
        self.now_s += down_s
        self.wall += down_s
        self.mono = 40.0


def progress(stage: str, done: float, total: float | None, unit: str, **detail: Any) -> dict[str, Any]:
    return {"stage": stage, "done": done, "total": total, "unit": unit, "detail": detail}


def started(recorder: Recorder) -> None:
    recorder.say(
        "run.started",
        run_id="20260528-202640-laptop",
        name="laptop",
        spec={
            "name": "laptop",
            "model": {"path": "smollm2-135m-instruct"},
            "prompts": "prompts/laptop.jsonl",
            "phases": [
                {"name": "baseline"},
                {"name": "capture"},
                {"name": "train"},
                {
                    "name": "speculative",
                    "jobs": [
                        {"kind": "bench", "name": "bench"},
                        {
                            "kind": "compare",
                            "name": "compare",
                            "baseline": "baseline/bench",
                            "candidate": "speculative/bench",
                        },
                    ],
                },
            ],
        },
        argv=["changeover", "run", "examples/laptop.yaml"],
        versions={"changeover": "0.1.0", "python": "3.11.9", "torch": "2.13.0", "transformers": "5.19.0"},
        host="laptop",
        model={"path": "/models/smollm2", "layers": 30, "hidden": 576, "vocab": 49152, "sha256": "cd" * 32},
        boot_id=BOOT,
        pid=4000,
    )


def server(recorder: Recorder, phase: str, profile: str, pid: int, *extra: str) -> None:
    recorder.say("baseline.taken", 0.1, phase=phase, baseline={"gpus": [], "shm": []})
    argv = [
        "python",
        "-m",
        "changeover.engines.embedded",
        "--model",
        "/models/smollm2",
        "--port",
        "41000",
        *extra,
    ]
    recorder.say(
        "server.starting",
        0.1,
        phase=phase,
        engine="embedded",
        profile=profile,
        argv=argv,
        env={"SPT_NOENV": "1", "OMP_NUM_THREADS": "2"},
        ports=[41000],
    )
    recorder.say(
        "server.started",
        0.2,
        phase=phase,
        pid=pid,
        start_ticks=pid * 10,
        sid=pid,
        url="http://127.0.0.1:41000",
        log=f"phases/{phase}/server/log",
    )
    members = [{"pid": pid, "start_ticks": pid * 10, "comm": "python"}]
    recorder.say("server.members", 0.3, phase=phase, members=members)
    for done in (60e6, 180e6, 269e6):
        recorder.say("server.loading", 2.5, phase=phase, progress=progress("weights", done, 269e6, "bytes"))
    recorder.say("server.ready", 1.4, phase=phase, seconds=9.4, url="http://127.0.0.1:41000")


def distribution(mean: float) -> dict[str, float]:
    shape = {"p50": 0.96, "p90": 1.18, "p95": 1.3, "p99": 1.62, "max": 1.7}
    return {"n": 8, "mean": mean, **{name: mean * factor for name, factor in shape.items()}}


def bench_result(speed: float, length: float | None, failed: int = 0) -> dict[str, Any]:
    levels = []
    for concurrency, tok_s, ttft_s in ((1, 13.1, 0.11), (4, 33.8, 0.24), (8, 47.9, 0.47)):
        repeats = []
        for repeat in (1, 2, 3):
            rate = tok_s * speed * (1 + 0.012 * (repeat - 2))
            drafts = 380 + concurrency
            acceptance = length and {
                "drafts": drafts,
                "draft_tokens": drafts * 3,
                "accepted_tokens": round(drafts * (length - 1)),
                "length": 1 + round(drafts * (length - 1)) / drafts,
                "rate": (length - 1) / 3,
            }
            repeats.append(
                {
                    "repeat": repeat,
                    "seconds": 8 * 60 / rate,
                    "requests": {
                        "sent": 8,
                        "ok": 8 - failed,
                        "failed": failed,
                        "reasons": {"reset": {"count": failed, "example": HOSTILE}} if failed else {},
                    },
                    "output_tok_s": rate,
                    "output_tokens": 480,
                    "output_hashes": [f"hash {index}" for index in range(8)],
                    "request_s": rate / 60,
                    "ttft_s": distribution(ttft_s),
                    "tpot_s": distribution(concurrency / rate),
                    "e2e_s": distribution(ttft_s + 60 * concurrency / rate),
                    "acceptance": acceptance,
                    "validity": {"valid": True, "reasons": []},
                    "missing": {} if length else {"acceptance": "the server has no speculation counters"},
                }
            )
        half = tok_s * speed * 0.03
        means = {
            "output_tok_s": tok_s * speed,
            "ttft_s": ttft_s,
            "tpot_s": 0.08 / speed,
            "e2e_s": 5.0 / speed,
        }
        summary: dict[str, Any] = {
            name: {
                "mean": mean,
                "interval": [mean - half * mean / (tok_s * speed), mean * 1.03],
                "reason": None,
            }
            for name, mean in means.items()
        }
        summary["acceptance"] = length and {
            **repeats[0]["acceptance"],
            "interval": [length - 0.06, length + 0.07],
            "interval_method": "bootstrap over prompts",
            "reason": None,
        }
        levels.append({"concurrency": concurrency, "repeats": repeats, "summary": summary})
    return {
        "schema_version": 1,
        "kind": "bench",
        "metric_schema": 1,
        "formulas": {
            "output_tok_s": "sum of usage.completion_tokens of successful requests / seconds of the repeat",
            "ttft_s": "t_first - t_sent",
            "tpot_s": "(t_last - t_first) / (n_out - n_first_chunk)",
        },
        "server": {"url": "http://127.0.0.1:41000", "model": "smollm2-135m-instruct", "engine": "embedded"},
        "client": {"changeover": "0.1.0", "cores": 2},
        "load": {
            "prompts_sha256": "ab" * 32,
            "api": "chat",
            "concurrency": [1, 4, 8],
            "max_tokens": 64,
            "temperature": 0.0,
            "seed": 0,
            "ignore_eos": False,
            "requests": 8,
            "distinct_prompts": 8,
            "repeats": 3,
        },
        "started_wall": WALL,
        "levels": levels,
        "warnings": [],
    }


def compare_result(ratio: float) -> dict[str, Any]:
    """What bench/compare.py really says of the two benchmarks."""
    return compare(bench_result(1.0, None), bench_result(ratio, 1.47))


def train_result() -> dict[str, Any]:
    """As drafter/train.py ends."""
    return {
        "drafter": "phases/03-train/jobs/train/drafter",
        "steps": 480,
        "epochs": 4,
        "seconds": 171.3,
        "cpu_seconds": 330.1,
        "tokens": 41_230,
        "tokens_per_s": 240.7,
        "loss_curve": [
            [step, 1.3 + 5.2 * math.exp(-step / 110) + 0.07 * math.sin(step)] for step in range(1, 481, 4)
        ],
        "step_kl": [1.1, 1.3, 1.5],
        "held_out_curve": [[step, 1 + 0.52 * (1 - math.exp(-step / 150))] for step in range(0, 481, 60)],
        "evaluation": {
            "draft_tokens": 3,
            "samples": 37,
            "verify_steps": 2893,
            "acceptance_length": 1.498,
            "ci95": [1.42, 1.57],
            "step_acceptance": [0.36, 0.25, None],
            "step_reached": [2893, 1041, 0],
        },
        "acceptance_length": 1.498,
        "train_samples": 335,
        "held_out_samples": 37,
        "vocabulary": {
            "size": 8192,
            "sha256": "01" * 32,
            "coverage_train": 0.9971,
            "coverage_held_out": 0.99,
        },
        "trained_parameters": 11_400_000,
        "boundaries": [2, 15, 27],
        "device": "cpu",
        "params": {"epochs": 4},
    }


def collect_result() -> dict[str, Any]:
    return {
        "states": "phases/02-capture/jobs/collect/states",
        "samples": 372,
        "held_out": 37,
        "failed": 0,
        "failures": [],
        "tokens": 46_120,
        "bytes": 46_120 * 4608,
        "boundaries": [2, 15, 27],
        "last_norm": "post",
        "supervised_tokens": 31_900,
        "probe": {
            "samples": 50,
            "rows": 5120,
            "agreed": 5114,
            "exact": 5090,
            "agreement": 0.9989,
            "passed": True,
        },
        "gate": {"requested": 372, "samples": 372, "failed": 0, "ids_sha256": "ef" * 32},
    }


def changeover(recorder: Recorder, phase: str, pid: int, verdict: Verdict = Verdict.CLEAN) -> None:
    targets = [{"leader": {"pid": pid, "start_ticks": pid * 10, "boot_id": BOOT}, "ports": [41000]}]
    recorder.say("changeover.started", 0.2, phase=phase, targets=targets)
    begun_s = recorder.now_s

    def sample(after_s: float, processes: int, rss_mib: float) -> None:
        at = recorder.now_s + after_s - begun_s
        recorder.say(
            "changeover.sample", after_s, phase=phase, t_s=at, processes=processes, rss_mib=rss_mib, gpus=[]
        )

    stages: list[StageRecord] = []

    def stage(name: str, seconds: float, outcome: str, detail: str = "") -> None:
        stages.append(StageRecord(name, seconds, outcome, detail))
        recorder.say("changeover.stage", phase=phase, **stages[-1].to_json())

    sample(0.0, 2, 1480.0)
    stage("plan", 0.01, "proved", "1 target, 2 processes")
    sample(0.25, 2, 1480.0)
    stage("drain", 0.31, "proved", "0 requests running")
    sent = SignalRecord(pid, pid * 10, "python", "SIGTERM", "forked by this run; pidfd held", "server")
    recorder.say("changeover.signal", 0.05, phase=phase, **sent.to_json())
    for index in range(6):
        sample(0.25, 2 if index < 4 else 1, 1480.0 * math.exp(-index / 2))
    stage("terminate", 0.02, "proved", "SIGTERM to 1 process")
    sample(0.25, 0, 0.0)
    stage("wait", 1.6, "proved", "all pidfds readable")
    stage("kill", 0.0, "skipped")
    stage("orphans", 0.04, "proved")
    stage("holders", 0.03, "proved")
    for _ in range(3):
        sample(0.25, 0, 0.0)
    stage("verify", 0.8, "proved" if verdict is Verdict.CLEAN else "expired")
    bad = verdict is not Verdict.CLEAN
    clearance = Clearance(
        verdict=verdict,
        evidence=(
            Evidence("processes", Verdict.CLEAN, "none of 2 left", "none", "pidfds readable"),
            Evidence(
                "port:41000",
                verdict,
                "bindable",
                f"held by pid 999 ({HOSTILE})" if bad else "bindable",
            ),
            Evidence("shm", Verdict.CLEAN, "as at the baseline (0 segments)", "0 segments"),
            Evidence(
                "gpu", Verdict.CLEAN, "memory back at the baseline", "no GPU present", "nothing to verify"
            ),
        ),
        stages=tuple(stages),
        signals=(sent,),
        refusals=(Refusal(1, 1, "systemd", "pid 1 is never signalled"),) if bad else (),
        seconds=recorder.now_s - begun_s,
        lost_requests=0,
    )
    recorder.say("changeover.cleared", 0.1, phase=phase, clearance=clearance.to_json())


def job(
    recorder: Recorder, phase: str, name: str, kind: str, seconds: float, result: Any, **params: Any
) -> None:
    recorder.say("job.starting", 0.05, phase=phase, job=name, kind=kind, params=params)
    recorder.say("job.started", 0.1, phase=phase, job=name, kind=kind, pid=5000, start_ticks=1, params=params)
    for part in range(1, 5):
        detail = {"loss": 6.0 / part} if kind == "train" else {}
        shown = progress(kind, part, 4, "parts", **detail)
        recorder.say("job.progress", seconds / 4, phase=phase, job=name, progress=shown)
    recorder.say("job.done", 0.1, phase=phase, job=name, kind=kind, seconds=seconds, result=result)


def phase_started(recorder: Recorder, name: str, index: int) -> None:
    recorder.say("phase.started", 0.1, phase=name, index=index, digest=f"{index:064x}")
    recorder.phase_began_s = recorder.now_s


def phase_done(recorder: Recorder, name: str) -> None:
    recorder.say(
        "phase.done",
        0.05,
        phase=name,
        digest="d" * 64,
        outputs={},
        seconds=recorder.now_s - recorder.phase_began_s,
    )


def baseline_phase(recorder: Recorder) -> None:
    phase_started(recorder, "baseline", 1)
    server(recorder, "baseline", "production", 4100)
    job(recorder, "baseline", "bench", "bench", 74.0, bench_result(1.0, None), prompts=HOSTILE)
    changeover(recorder, "baseline", 4100)
    phase_done(recorder, "baseline")


def capture_phase(recorder: Recorder) -> None:
    phase_started(recorder, "capture", 2)
    server(recorder, "capture", "capture", 4200, "--capture-dir", "/dev/shm/x", "--aux-boundaries", "2,15,27")
    job(recorder, "capture", "collect", "collect", 121.0, collect_result(), samples=372)
    changeover(recorder, "capture", 4200)
    phase_done(recorder, "capture")


def train_phase(recorder: Recorder) -> None:
    phase_started(recorder, "train", 3)
    job(recorder, "train", "train", "train", 171.3, train_result(), epochs=4)
    changeover(recorder, "train", 4300)
    phase_done(recorder, "train")


def speculative_phase(recorder: Recorder) -> None:
    phase_started(recorder, "speculative", 4)
    server(recorder, "speculative", "speculative", 4400, "--drafter", "drafter", "--draft-tokens", "3")
    job(recorder, "speculative", "bench", "bench", 55.0, bench_result(1.38, 1.47))
    job(
        recorder,
        "speculative",
        "compare",
        "compare",
        0.4,
        compare_result(1.38),
        baseline="/runs/x/phases/01-baseline/jobs/bench/result.json",
        candidate="/runs/x/phases/04-speculative/jobs/bench/result.json",
    )
    changeover(recorder, "speculative", 4400)
    phase_done(recorder, "speculative")


def finished() -> list[Event]:
    """Four phases, four clean changeovers, 1.38 times the baseline."""
    recorder = Recorder()
    started(recorder)
    for phase in (baseline_phase, capture_phase, train_phase, speculative_phase):
        phase(recorder)
    recorder.say("run.done", 0.05, seconds=recorder.now_s + 0.05, reason=None)
    return recorder.events


def failed() -> list[Event]:
    """The collection failed with HTML in its log, and the changeover after it found the port held."""
    recorder = Recorder()
    started(recorder)
    baseline_phase(recorder)
    phase_started(recorder, "capture", 2)
    server(recorder, "capture", "capture", 4200)
    recorder.say(
        "job.started", 0.1, phase="capture", job="collect", kind="collect", pid=1, start_ticks=1, params={}
    )
    tail = f"Traceback (most recent call last):\n{HOSTILE}\nRuntimeError: no space left"
    recorder.say(
        "job.failed",
        31.0,
        phase="capture",
        job="collect",
        kind="collect",
        reason="exit code 1",
        log_tail=tail,
    )
    changeover(recorder, "capture", 4200, Verdict.FOREIGN_HOLDER)
    recorder.say("phase.failed", 0.1, phase="capture", reason=f"job collect failed: {HOSTILE}")
    recorder.say("run.failed", 0.1, seconds=recorder.now_s + 0.1, reason="phase capture failed")
    return recorder.events


def interrupted() -> list[Event]:
    """Ctrl-C in the training; the machine was cleared."""
    recorder = Recorder()
    started(recorder)
    baseline_phase(recorder)
    capture_phase(recorder)
    phase_started(recorder, "train", 3)
    recorder.say(
        "job.started", 0.1, phase="train", job="train", kind="train", pid=1, start_ticks=1, params={}
    )
    for step in range(20):
        shown = progress(
            "train", step, 480, "steps", loss=6 - step / 5, acceptance_length=1 + step // 10 / 10
        )
        recorder.say("job.progress", 1.0, phase="train", job="train", progress=shown)
    changeover(recorder, "train", 4300)
    recorder.say("run.interrupted", 0.1, seconds=recorder.now_s + 0.1, reason="SIGINT")
    return recorder.events


def resumed() -> list[Event]:
    """The machine rebooted in the training; the run was resumed a quarter of an hour later and finished."""
    recorder = Recorder()
    recorder.events = interrupted()[:-1]
    recorder.wall, recorder.mono = recorder.events[-1].t_wall, recorder.events[-1].t_mono
    recorder.now_s = recorder.wall - WALL
    recorder.reboot(900.0)
    after = recorder.events[-1].seq
    recorder.say("run.resumed", pid=77, boot_id="another-boot", after_seq=after)
    train_phase(recorder)
    speculative_phase(recorder)
    recorder.say("run.done", 0.05, seconds=recorder.now_s, reason=None)
    return recorder.events


def gpu_box() -> list[Event]:
    """A changeover of ten minutes on eight GPUs, four samples a second."""
    recorder = Recorder()
    started(recorder)
    phase_started(recorder, "baseline", 1)
    recorder.say("changeover.started", 0.2, phase="baseline", targets=[])
    for index in range(2400):
        used = 93_000.0 * math.exp(-index / 600)
        gpus = [{"uuid": f"GPU-{gpu:08x}-0000-0000", "used_mib": used + gpu + index % 7} for gpu in range(8)]
        recorder.say(
            "changeover.sample",
            0.25,
            phase="baseline",
            t_s=index / 4,
            processes=9 if index < 2000 else 0,
            rss_mib=used,
            gpus=gpus,
        )
    return recorder.events
