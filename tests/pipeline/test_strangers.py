"""What others do on the machine while a run goes on: it is never taken for the run's own."""

import threading
from http.server import ThreadingHTTPServer

from changeover.machine.local import LocalMachine
from changeover.pipeline import commands, serving
from changeover.pipeline.folder import create_run
from changeover.pipeline.journal import read_events
from changeover.pipeline.load import check_pipeline
from changeover.pipeline.runner import start_run
from tests.pipeline.stub.run import MODEL, StubEngine, spec
from tests.pipeline.stub.server import Handler


def test_a_stranger_on_the_servers_port_is_not_taken_for_the_server(tmp_path, monkeypatch):
    monkeypatch.setenv("CHANGEOVER_LOCK_DIR", str(tmp_path))
    for room in (commands, serving):
        monkeypatch.setattr(room, "get_engine", lambda kind: StubEngine())
    stranger = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=stranger.serve_forever, daemon=True).start()
    document = spec(tmp_path, "print(1)")
    document["phases"][0]["server"]["port"] = stranger.server_address[1]
    run = create_run(tmp_path / "runs", "stub")
    try:
        code = start_run(
            run, check_pipeline(document, source="test"), MODEL, LocalMachine(), lambda event: None
        )
    finally:
        stranger.shutdown()
        stranger.server_close()
    events = read_events(run.journal)
    assert not [event for event in events if event.event in ("server.starting", "job.done")]
    assert code == 5
    assert "somebody listens there" in events[-1].data["reason"]
