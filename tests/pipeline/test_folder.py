import fcntl
import os
import stat
import subprocess
import sys
import threading
import time

import pytest

from changeover.machine.durable import replace_json
from changeover.machine.errors import InvalidInput
from changeover.pipeline.folder import RunBusy, RunFolder, create_run, find_run, list_runs, newest_run_of
from changeover.pipeline.follow import Tail, Throttle, log_tail, read_progress
from changeover.pipeline.outputs import changed_outputs, record_outputs
from changeover.pipeline.working import prepare_folder

HOLD = """
import sys, time
from pathlib import Path
from changeover.pipeline.folder import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    print("locked", flush=True)
    time.sleep(60)
"""


def test_the_secret_is_readable_by_its_owner_only_and_stays(tmp_path):
    folder = create_run(tmp_path, "r")
    secret = folder.secret()
    assert len(secret) == 32
    assert stat.S_IMODE((folder.path / "secret").stat().st_mode) == 0o600
    assert RunFolder(folder.path).secret() == secret


@pytest.mark.parametrize("content", [None, ""])
def test_a_run_that_has_lost_its_secret_is_not_given_another(tmp_path, content):
    """With another one, its processes would be strangers, and the machine clean while they live."""
    folder = create_run(tmp_path, "r")
    folder.secret()
    folder.journal.touch()
    (folder.path / "secret").unlink()
    if content is not None:
        (folder.path / "secret").write_text(content)
    with pytest.raises(InvalidInput, match="which its processes carry"):
        folder.cookie("one", "server")


def test_cookies_differ_by_run_phase_and_process_and_come_back(tmp_path):
    one, two = create_run(tmp_path, "r"), create_run(tmp_path, "r")
    cookies = {
        one.cookie("a", "server"),
        one.cookie("b", "server"),
        one.cookie("a", "bench"),
        two.cookie("a", "server"),
    }
    assert len(cookies) == 4
    assert RunFolder(one.path).cookie("a", "server") in cookies
    assert one.secret() not in cookies


def test_two_runs_of_one_second_get_two_folders(tmp_path):
    assert create_run(tmp_path, "r").path != create_run(tmp_path, "r").path


def test_a_run_is_worked_on_by_one_changeover_and_free_when_that_is_killed(tmp_path):
    folder = create_run(tmp_path, "r")
    assert folder.runner_pid() is None
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(folder.path)], stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"locked\n"
    assert folder.runner_pid() == other.pid
    with pytest.raises(RunBusy, match=f"pid {other.pid}"), folder.locked():
        pass
    other.kill()
    other.wait()
    with folder.locked():
        pass


def test_a_look_at_the_lock_does_not_make_the_run_busy(tmp_path):
    folder = create_run(tmp_path, "r")
    with folder.locked():
        assert folder.runner_pid() == os.getpid()
    look = os.open(folder.path / "lock", os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH)
    threading.Timer(0.03, os.close, [look]).start()
    with folder.locked():
        assert folder.runner_pid() == os.getpid()


def test_runs_are_found_by_id_by_folder_and_as_the_newest(tmp_path):
    first, second = create_run(tmp_path, "a"), create_run(tmp_path, "b")
    for age, folder in ((10, first), (0, second)):
        folder.journal.touch()
        os.utime(folder.journal, (time.time() - age,) * 2)
    assert [run.run_id for run in list_runs(tmp_path)] == [first.run_id, second.run_id]
    assert find_run(None, tmp_path) == second
    assert find_run(first.run_id, tmp_path) == first
    assert find_run(str(first.path), tmp_path / "elsewhere") == first
    with pytest.raises(InvalidInput, match=second.run_id):
        find_run("nothere", tmp_path)


def test_a_pipeline_is_resumed_by_its_own_newest_run(tmp_path):
    runs = [create_run(tmp_path, name) for name in ("a", "a", "a-b", "a")]
    for age, (run, name) in enumerate(zip(reversed(runs), [None, "a-b", "a", "a"], strict=True)):
        run.journal.touch()
        os.utime(run.journal, (time.time() - age,) * 2)
        if name is not None:
            replace_json(run.description, {"name": name})
    assert newest_run_of("a", tmp_path) == runs[1]
    assert newest_run_of("a-b", tmp_path) == runs[2]
    with pytest.raises(InvalidInput, match="a run of pipeline `b`"):
        newest_run_of("b", tmp_path)


def test_outputs_are_recorded_and_every_change_is_named(tmp_path):
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "a.bin").write_bytes(b"12345")
    (tmp_path / "result.json").write_text("{}")
    recorded = record_outputs(tmp_path, ["result.json", "drafter"])
    assert [entry["path"] for entry in recorded] == ["result.json", "drafter/a.bin"]
    assert changed_outputs(tmp_path, recorded) == []
    (tmp_path / "drafter" / "a.bin").write_bytes(b"12346")
    assert "drafter/a.bin: expected 5 bytes" in changed_outputs(tmp_path, recorded)[0]
    (tmp_path / "result.json").unlink()
    assert changed_outputs(tmp_path, recorded)[0] == "result.json: missing"


def test_an_output_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        record_outputs(tmp_path, ["result.json"])


def test_a_result_is_strict_json_or_absent(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        replace_json(tmp_path / "result.json", {"x": float("inf")})
    assert not (tmp_path / "result.json").exists()


def test_a_tail_gives_complete_new_lines_only(tmp_path):
    path = tmp_path / "progress.jsonl"
    path.write_text("old\n")
    tail = Tail(path)
    assert tail.lines() == []
    with path.open("a") as file:
        file.write("one\ntw")
    assert tail.lines() == [b"one"]
    with path.open("a") as file:
        file.write("o\n")
    assert tail.lines() == [b"two"]
    assert Tail(tmp_path / "absent").lines() == []


def test_torn_progress_is_left_out():
    good = b'{"stage": "s", "done": 1, "total": null, "unit": "u", "detail": {}}'
    assert [progress.stage for progress in read_progress([good, b'{"stage"', b"[1]"])] == ["s"]


def test_a_loss_that_is_no_number_is_left_out_of_the_progress():
    line = (
        b'{"stage": "s", "done": 1, "total": null, "unit": "u", "detail": {"loss": NaN, "eta_s": Infinity}}'
    )
    (progress,) = read_progress([line])
    assert progress.detail == {"loss": None, "eta_s": None}
    assert read_progress([line.replace(b'"done": 1', b'"done": NaN')]) == []


def test_the_tail_of_a_log_is_its_last_lines(tmp_path):
    (tmp_path / "log").write_text("\n".join(str(number) for number in range(100)))
    assert log_tail(tmp_path / "log", 2) == "98\n99"
    assert log_tail(tmp_path / "none") == ""


def test_a_job_folder_stays_for_the_same_question_and_is_set_aside_for_another(tmp_path):
    folder = prepare_folder(tmp_path / "train", "digest")
    replace_json(folder / "job.json", {"digest": "digest"})
    (folder / "checkpoint").write_text("precious")
    replace_json(folder / "failure.json", {"seen": "what an earlier try failed of"})
    assert (prepare_folder(folder, "digest") / "checkpoint").exists()
    assert not (folder / "failure.json").exists()
    assert not (prepare_folder(folder, "another") / "checkpoint").exists()
    assert (tmp_path / "train.replaced-1" / "checkpoint").read_text() == "precious"


def test_progress_is_thinned_as_a_job_gets_long():
    now = [0.0]
    due = Throttle(lambda: now[0], period_s=1.0, share=1 / 600)
    let_through = 0
    for second in range(10 * 3600):
        now[0] = float(second)
        let_through += due.allows("train")
    assert 600 < let_through < 4000
