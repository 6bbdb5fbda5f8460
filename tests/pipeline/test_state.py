from changeover.pipeline.journal import Event
from changeover.pipeline.state import RunVerdict, read_state

BOOT = "boot"
LEADER = {"pid": 10, "start_ticks": 100, "boot_id": BOOT}
CLEAN = {"verdict": "clean"}


def journal(*events):
    return [Event(seq, 0.0, 0.0, name, data) for seq, (name, data) in enumerate(events)]


STARTED = ("run.started", {"run_id": "r", "spec": {}, "boot_id": BOOT})
PHASE = ("phase.started", {"phase": "p", "index": 0, "digest": "d"})
BASELINE = ("baseline.taken", {"phase": "p", "baseline": {"gpus": []}})
STARTING = ("server.starting", {"phase": "p", "ports": [8000], "engine": "embedded", "url": "http://x"})
SERVER = ("server.started", {"phase": "p", "leader": LEADER})
JOB_STARTING = ("job.starting", {"phase": "p", "job": "bench", "kind": "bench", "files": ["/f"]})
JOB_DONE = (
    "job.done",
    {"phase": "p", "job": "bench", "kind": "bench", "digest": "j", "result": {}, "outputs": []},
)
CLEARED = ("changeover.cleared", {"phase": "p", "clearance": CLEAN})


def test_a_server_that_was_about_to_start_is_something_to_clear():
    phase = read_state(journal(STARTED, PHASE, BASELINE, STARTING)).phase("p")
    assert phase.unclear
    assert phase.processes["server"].leader is None
    assert phase.processes["server"].ports == (8000,)


def test_a_started_server_is_known_by_its_identity_and_its_members():
    members = ("server.members", {"phase": "p", "process": "server", "members": [LEADER], "segments": []})
    process = read_state(journal(STARTED, PHASE, STARTING, SERVER, members)).phase("p").processes["server"]
    assert process.leader.pid == 10
    assert {member.pid for member in process.members} == {10}


def test_only_a_clean_clearance_makes_the_phase_clear():
    before = (STARTED, PHASE, STARTING, SERVER, JOB_STARTING)
    dirty = ("changeover.cleared", {"phase": "p", "clearance": {"verdict": "dirty"}})
    assert read_state(journal(*before, dirty)).phase("p").unclear
    state = read_state(journal(*before, CLEARED))
    assert not state.phase("p").unclear
    assert state.last_clearance_seq == 5


def test_a_phase_is_done_only_when_it_says_so():
    events = (STARTED, PHASE, STARTING, SERVER, JOB_STARTING, JOB_DONE, CLEARED)
    assert not read_state(journal(*events)).phase("p").done
    assert read_state(journal(*events, ("phase.done", {"phase": "p"}))).phase("p").done


def test_another_question_makes_done_jobs_not_done():
    again = ("phase.started", {"phase": "p", "index": 0, "digest": "another"})
    assert "bench" in read_state(journal(STARTED, PHASE, JOB_DONE, PHASE)).phase("p").jobs
    assert "bench" not in read_state(journal(STARTED, PHASE, JOB_DONE, again)).phase("p").jobs


def test_the_end_of_a_run_and_its_resumption():
    failed = ("run.failed", {"seconds": 3.0, "reason": "why"})
    assert read_state(journal(STARTED)).verdict is RunVerdict.OPEN
    state = read_state(journal(STARTED, failed))
    assert (state.verdict, state.reason, state.seconds) == (RunVerdict.FAILED, "why", 3.0)
    assert read_state(journal(STARTED, failed, ("run.resumed", {"boot_id": BOOT}))).verdict is RunVerdict.OPEN
