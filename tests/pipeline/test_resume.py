"""Going on when something is no longer as it was: the machine was restarted, a file or the model is gone."""

import dataclasses
import signal

from changeover.machine.errors import InvalidInput
from changeover.machine.local import LocalMachine
from changeover.pipeline.journal import read_events
from changeover.pipeline.runner import resume_run
from changeover.pipeline.state import PhaseState
from changeover.pipeline.targets import baseline_of
from changeover.teardown.footprint import take_baseline
from tests.pipeline.test_crash import SLEEP, alive, changeover, folder, wait_for  # noqa: F401 - folder is a fixture


def quiet(_event):
    pass


def test_a_missing_model_does_not_keep_what_was_left_alive(folder):  # noqa: F811
    first = changeover(folder, "start", work=SLEEP)
    wait_for(folder, "job.started")
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert alive(folder)

    def missing(_spec):
        raise InvalidInput(expected="the model", seen="no such folder", todo="Give it back.")

    assert resume_run(folder, missing, LocalMachine(), quiet) == 2
    assert alive(folder) == []
    last = read_events(folder.journal)[-1]
    assert last.event == "run.failed"
    assert "no such folder" in last.data["reason"]


def test_after_a_reboot_the_machine_returns_to_what_it_is_now():
    machine = LocalMachine()
    before = take_baseline(machine)
    phase = PhaseState("one", 0, baseline=before.to_json())
    assert baseline_of(phase, machine, []) == before
    phase.baseline = dataclasses.replace(before, boot_id="another").to_json()
    assert baseline_of(phase, machine, []).boot_id == machine.boot_id
