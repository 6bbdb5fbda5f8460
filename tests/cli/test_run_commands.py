"""run, plan, status, attach and stop as a user calls them."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from changeover.machine.clock import SystemClock
from changeover.pipeline.folder import create_run
from changeover.pipeline.journal import EventName, Journal
from tests.pipeline.test_crash import SLEEP, alive, changeover, folder, wait_for  # noqa: F401 - folder is a fixture

ROOT = Path(__file__).parents[2]


def command(*arguments, **kwargs):
    argv = [sys.executable, "-m", "changeover", *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False, **kwargs)


def test_plan_of_the_laptop_run(tmp_path):
    done = command("plan", "examples/laptop.yaml", "--models-dir", tmp_path, "--runs-dir", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["phases"][0]["name"] == "baseline"


def test_a_dry_run_starts_nothing(tmp_path):
    done = command(
        "run", "examples/laptop.yaml", "--dry-run", "--models-dir", tmp_path, "--runs-dir", tmp_path / "r"
    )
    assert done.returncode == 0, done.stderr
    assert "phase speculative" in done.stdout
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "a pipeline file"),
        (["run", "examples/laptop.yaml", "--host", "box"], "this machine"),
        (["run", "examples/laptop.yaml", "engin.kind=x"], "did you mean `engine`?"),
        (["plan", "examples/nothere.yaml"], "examples/laptop.yaml"),
        (["status", "nothere"], "nothere"),
        (["run", "--resume", "nothere"], "nothere"),
        (["run", "--resume", "examples/laptop.yaml"], "a run of pipeline `laptop`"),
        (["stop", "nothere"], "nothere"),
    ],
)
def test_wrong_use_ends_with_2_and_says_what_is_right(arguments, words, tmp_path):
    extra = [] if arguments[0] == "plan" else ["--runs-dir", tmp_path]
    done = command(*arguments, *extra)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_with_json_is_one_object_on_stdout(tmp_path):
    done = command("run", "examples/laptop.yaml", "engin.kind=x", "--json", "--runs-dir", tmp_path)
    assert json.loads(done.stdout)["exit_code"] == 2


def test_a_resumed_run_takes_no_other_values(tmp_path, folder):  # noqa: F811
    done = command("run", folder.path, "seed=1", "--resume")
    assert done.returncode == 2
    assert "no overrides" in done.stderr


def test_a_run_can_be_looked_at_followed_and_stopped(folder):  # noqa: F811
    runner = changeover(folder, "start", work=SLEEP)
    wait_for(folder, "job.started")
    seen = command("status", folder.path, "--json")
    assert f"running (pid {runner.pid})" in seen.stdout
    attached = subprocess.Popen(
        [sys.executable, "-m", "changeover", "attach", str(folder.path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    stopped = command("stop", folder.path)
    assert stopped.returncode == 0, stopped.stderr
    assert "the machine is cleared" in stopped.stderr
    assert runner.wait(60) == 130
    assert attached.wait(60) == 130
    assert "SIGTERM to pid" in attached.stderr.read()
    assert alive(folder) == []


def test_a_run_that_was_killed_is_said_to_be_cut_off_and_stop_sends_nothing(folder):  # noqa: F811
    runner = changeover(folder, "start", work=SLEEP)
    wait_for(folder, "job.started")
    runner.send_signal(signal.SIGKILL)
    runner.wait(60)
    assert "cut off" in command("status", folder.path).stdout
    assert alive(folder) != []
    assert "changeover clear --run" in command("stop", folder.path).stderr
    assert command("attach", folder.path).returncode == 6
    cleared = command("clear", "--run", folder.path, "--json")
    assert cleared.returncode == 0, cleared.stderr
    assert json.loads(cleared.stdout)["verdict"] == "clean"
    assert alive(folder) == []


_ENDS_AT_SIGTERM = """
import signal, sys
from pathlib import Path
from changeover.machine.clock import SystemClock
from changeover.pipeline.folder import RunFolder
from changeover.pipeline.folder import create_run
from changeover.pipeline.journal import EventName, Journal
folder = RunFolder(Path(sys.argv[1]))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with folder.locked():
    journal = Journal(folder.journal, SystemClock())
    journal.append(EventName.RUN_STARTED, run_id="r", spec={}, boot_id="b")
    signal.sigwait([signal.SIGTERM])
    if sys.argv[2]:
        journal.append(EventName.RUN_FAILED, seconds=1.0, reason="a GPU is dirty", exit_code=int(sys.argv[2]))
"""


@pytest.mark.parametrize(("end", "status"), [("4", 4), ("7", 0), ("130", 0), ("", 6)])
def test_stop_ends_with_the_runs_exit_code_where_the_machine_is_not_proven_clean(tmp_path, end, status):
    run = create_run(tmp_path, "r")
    runner = subprocess.Popen([sys.executable, "-c", _ENDS_AT_SIGTERM, str(run.path), end], cwd=ROOT)
    wait_for(run, "run.started")
    assert command("stop", run.path).returncode == status
    assert runner.wait(60) == 0


def test_a_run_that_was_cleared_after_its_end_is_not_called_cut_off(tmp_path):
    run = create_run(tmp_path, "r")
    journal = Journal(run.journal, SystemClock())
    journal.append(EventName.RUN_STARTED, run_id="r", spec={}, boot_id="b")
    journal.append(EventName.RUN_FAILED, seconds=1.0, reason="a GPU is dirty", exit_code=4)
    journal.append(EventName.CHANGEOVER_STAGE, phase="one", stage="verify", seconds=0.1)
    done = command("attach", run.path)
    assert done.returncode == 4
    assert "cut off" not in done.stderr


@pytest.mark.parametrize("runs_dir", ["file", "file/below"])
def test_a_runs_folder_that_cannot_be_made_is_named(tmp_path, runs_dir):
    (tmp_path / "file").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({"num_hidden_layers": 1, "hidden_size": 1, "vocab_size": 1})
    )
    (tmp_path / "model" / "x.safetensors").touch()
    (tmp_path / "p.yaml").write_text(
        "{name: p, model: ./model, prompts: x, phases: [{name: a, jobs: [{kind: command, name: c, argv: ['true']}]}]}"
    )
    done = command("run", tmp_path / "p.yaml", "--runs-dir", tmp_path / runs_dir, "--json")
    assert done.returncode == 2
    assert "file" in json.loads(done.stdout)["seen"]
    assert "Traceback" not in done.stderr
