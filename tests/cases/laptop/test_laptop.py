"""The laptop pipeline on a smaller setting, with the real model, killed twice on its way and resumed.

Everything that the example promises is checked on one run: its server, its states, its drafter, its benchmarks, its
changeovers and its page.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from changeover.machine.processes import COOKIE_VARIABLE
from changeover.pipeline.folder import RunFolder, list_runs
from changeover.pipeline.journal import read_events
from tests.browser import open_page

ROOT = Path(__file__).parents[3]
PROMPTS = 60
SETTINGS = [
    "phases.baseline.jobs.bench.requests=2",
    "phases.baseline.jobs.bench.max_tokens=16",
    "phases.baseline.jobs.bench.repeats=2",
    "phases.capture.jobs.collect.max_tokens=32",
    "phases.capture.jobs.collect.held_out=0.2",
    "phases.train.jobs.train.epochs=2",
    "phases.train.jobs.train.draft_vocab_size=1024",
    "phases.train.jobs.train.checkpoint_every_s=0.5",
    "phases.speculative.jobs.bench.requests=2",
    "phases.speculative.jobs.bench.max_tokens=16",
    "phases.speculative.jobs.bench.repeats=2",
    "phases.speculative.jobs.held-out.max_tokens=32",
    "phases.speculative.jobs.held-out.concurrency=[1]",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_dir):
    """A finished run that was killed by SIGKILL while it collected and while it trained."""
    tmp = tmp_path_factory.mktemp("laptop run")  # with a space in it, as users have
    lines = (ROOT / "examples" / "prompts" / "laptop.jsonl").read_text().splitlines()
    prompts = tmp / "prompts.jsonl"
    prompts.write_text("\n".join(lines[:: len(lines) // PROMPTS][:PROMPTS]) + "\n")
    environment = {**os.environ, "CHANGEOVER_LOCK_DIR": str(tmp), "HF_HUB_OFFLINE": "1"}
    started = start(
        ["run", ROOT / "examples" / "laptop.yaml", *SETTINGS, f"prompts={prompts}", f"model={model_dir}"],
        tmp,
        environment,
    )
    folder = kill_when(started, tmp, has_committed_samples)
    resumed = start(["run", "--resume"], tmp, environment)
    kill_when(resumed, tmp, has_trained)
    last = start(["run", "--resume", "--json"], tmp, environment)
    out, err = last.communicate(timeout=900)
    assert last.returncode == 0, err[-4000:]
    return folder, json.loads(out)


def start(arguments, tmp, environment):
    argv = [sys.executable, "-m", "changeover", *map(str, arguments), "--runs-dir", str(tmp / "runs")]
    return subprocess.Popen(
        argv, env=environment, cwd=tmp, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def has_committed_samples(folder: RunFolder) -> bool:
    index = folder.job(1, "capture", "collect") / "states" / "index.jsonl"
    return index.exists() and index.stat().st_size > 0


def has_trained(folder: RunFolder) -> bool:
    """A few steps, and with them a checkpoint."""
    return any((folder.job(2, "train", "train") / "checkpoints").glob("*"))


def kill_when(process, tmp, ready, timeout_s=600.0) -> RunFolder:
    """SIGKILL the runner as soon as its run is ``ready``; its server and job live on, as after a crash."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        runs = list_runs(tmp / "runs")
        if runs and ready(runs[-1]):
            process.kill()
            process.communicate()
            return runs[-1]
        assert process.poll() is None, process.communicate()[1][-4000:]
        time.sleep(0.1)
    raise AssertionError(
        f"not within {timeout_s} s: {[event.event for event in read_events(runs[-1].journal)][-5:]}"
    )


def results(folder, kind):
    return [
        event.data["result"]
        for event in read_events(folder.journal)
        if event.event == "job.done" and event.data["kind"] == kind
    ]


@pytest.mark.engine
@pytest.mark.slow
class TestLaptopRun:
    def test_every_phase_is_done_and_done_once(self, run):
        folder, said = run
        assert said["verdict"] == "done"
        assert said["phases"] == dict.fromkeys(["baseline", "capture", "train", "speculative"], True)
        done = [
            (event.data["phase"], event.data["job"])
            for event in read_events(folder.journal)
            if event.event == "job.done"
        ]
        assert len(done) == len(set(done)) == 6

    def test_every_changeover_ended_clean_the_two_after_the_kills_too(self, run):
        folder, _ = run
        clearances = [
            event.data["clearance"]
            for event in read_events(folder.journal)
            if event.event == "changeover.cleared"
        ]
        assert len(clearances) == 6
        assert {clearance["verdict"] for clearance in clearances} == {"clean"}
        for clearance in clearances:
            seen = {item["item"].partition(":")[0]: item["seen"] for item in clearance["evidence"]}
            assert {"processes", "shared-memory", "files"} <= set(seen)
            assert "gpu" in seen if gpu_here() else seen["gpus"] == "no GPU present"

    def test_no_process_of_the_run_is_left(self, run):
        folder, _ = run
        names = [("baseline", "server"), ("capture", "server"), ("capture", "collect"), ("train", "train")]
        wanted = {f"{COOKIE_VARIABLE}={folder.cookie(*name)}".encode() for name in names}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    variables = set((entry / "environ").read_bytes().split(b"\0"))
                except (OSError, ProcessLookupError):
                    continue
                assert not variables & wanted, entry

    def test_the_killed_collection_went_on_where_it_was(self, run):
        (collected,) = results(run[0], "collect")
        assert collected["samples"] == PROMPTS
        assert collected["samples_before"] > 0
        assert collected["asked"] == PROMPTS - collected["samples_before"]

    def test_the_states_hold_and_their_gate_is_closed(self, run):
        states = run[0].job(1, "capture", "collect") / "states"
        assert json.loads((states / "manifest.json").read_text())["sealed"] is True
        verified = subprocess.run(
            [sys.executable, "-m", "changeover", "states", "verify", str(states), "--all"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert verified.returncode == 0, verified.stderr

    def test_the_drafter_learned_and_the_killed_training_went_on(self, run):
        (trained,) = results(run[0], "train")
        steps = [step for step, _ in trained["loss_curve"]]
        assert steps == sorted(set(steps)) and steps[-1] == trained["steps"]
        assert trained["evaluation"]["ci95"][0] > 1.0
        config = json.loads((Path(trained["drafter"]) / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]

    def test_the_server_accepts_what_the_simulation_said_within_3_percent(self, run):
        (trained,) = results(run[0], "train")
        held_out = next(
            event.data["result"]
            for event in read_events(run[0].journal)
            if event.event == "job.done" and event.data["job"] == "held-out"
        )
        measured = held_out["levels"][0]["summary"]["acceptance"]
        assert measured["length"] == pytest.approx(trained["evaluation"]["acceptance_length"], rel=0.03)
        assert measured["interval"][0] > 1.0

    def test_the_drafter_changes_no_token(self, run):
        (compared,) = results(run[0], "compare")
        single = next(level for level in compared["levels"] if level["concurrency"] == 1)
        assert single["outputs_equal"]["share"] == 1.0

    @pytest.mark.browser
    def test_the_page_opens_and_shows_it(self, run, chromium):
        dom, messages = open_page(chromium, run[0].report)
        assert messages == []
        for words in ("baseline", "speculative", "MiB" if gpu_here() else "no GPU present", "clean"):
            assert words in dom
        assert dom.count("<svg") > 10


def gpu_here() -> bool:
    return Path("/dev/nvidiactl").exists()


@pytest.mark.engine
@pytest.mark.slow
def test_ctrl_c_while_the_real_server_loads_clears_the_machine(tmp_path, model_dir):
    environment = {**os.environ, "CHANGEOVER_LOCK_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    process = start(["run", ROOT / "examples" / "laptop.yaml", f"model={model_dir}"], tmp_path, environment)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        runs = list_runs(tmp_path / "runs")
        if runs and any(event.event == "server.started" for event in read_events(runs[0].journal)):
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    last = read_events(runs[0].journal)[-1]
    assert last.event == "run.interrupted"
    assert "the machine is cleared" in last.data["reason"]
