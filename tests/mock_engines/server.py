"""The mock itself: standard library only, so that it starts at once."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "recorded"


class MockEngine:
    """One engine: its recorded answers, what runs on which rank, and what it has counted."""

    def __init__(self, kind: str, name: str, scenario: dict[str, Any]) -> None:
        record = json.loads((RECORDED / f"{kind}.json").read_text().replace("MODEL", name))
        self.kind, self.scenario = kind, scenario
        self.idle, self.busy = {**record["idle"], **record["after"]}, record["busy"]
        self.running = [0, 0]
        self.answered = [0, 0]
        self.aborted = threading.Event()
        self._turn = itertools.count()
        self._lock = threading.Lock()

    def recorded(self, asked: str) -> dict[str, Any] | None:
        """The answer to this question, as the server answers it now; None where the real one was never asked."""
        state = self.busy if sum(self.running) and asked in self.busy else self.idle
        answer = state.get(asked) or self.busy.get(asked)
        if answer is None:
            return None
        body = answer["body"]
        if asked.startswith("GET /v1/loads"):
            body = self._loads(json.loads(body))
        if asked == "GET /metrics":
            body = "\n".join(map(self._metric, self.idle[asked]["body"].splitlines())) + "\n"
        return {**answer, "body": body}

    def generate(self) -> bool:
        """Take as long as the scenario says; False where it was aborted."""
        with self._lock:
            rank = next(self._turn) % 2
            self.running[rank] += 1
        try:
            done = not self.aborted.wait(self.scenario["request_s"])
        finally:
            with self._lock:
                self.running[rank] -= 1
        with self._lock:
            self.answered[rank] += done
        return done

    def _loads(self, said: dict[str, Any]) -> str:
        for load in said["loads"]:
            load["num_running_reqs"], load["num_waiting_reqs"] = self.running[load["dp_rank"]], 0
        return json.dumps(said)

    def _metric(self, line: str) -> str:
        """A recorded line with this server's count added: its labels and its lifetime are the recording's."""
        found = re.match(r"^(\w+:\w+)\{(.*)\} (\S+)$", line)
        if found is None:
            return line
        name, labels, value = found.groups()
        label = re.search(r'(?:engine|dp_rank)="(\d)"', labels)
        rank = int(label[1]) if label else 0
        counts = self.answered[rank]
        added = {
            "vllm:spec_decode_num_drafts_total": counts * self.scenario["drafts"],
            "vllm:spec_decode_num_draft_tokens_total": counts * self.scenario["drafts"] * 3,
            "vllm:spec_decode_num_accepted_tokens_total": counts * self.scenario["accepted"],
        }
        if name in ("vllm:num_requests_running", "sglang:num_running_reqs"):
            return f"{name}{{{labels}}} {float(self.running[rank])}"
        return f"{name}{{{labels}}} {float(value) + added.get(name, 0)}"


def handler(engine: MockEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(engine.recorded(f"GET {self.path}"))

        def do_POST(self) -> None:
            asked = f"POST {self.path}"
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            if self.path == "/abort_request":
                engine.aborted.set()
            if "completions" in self.path and body.get("max_tokens") != 1 and not engine.generate():
                self.close_connection = True
                return
            self._answer(engine.recorded(asked))

        def _answer(self, answer: dict[str, Any] | None) -> None:
            content = (answer or {"body": "Not Found"})["body"].encode()
            self.send_response(answer["status"] if answer else 404)
            self.send_header("Content-Type", (answer or {}).get("content_type") or "text/plain")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def load(scenario: dict[str, Any]) -> None:
    """Pretend to, in lines of a log, until it is done, dead, or silent for ever."""
    began_s = time.monotonic()
    while (now_s := time.monotonic() - began_s) < scenario["load_s"]:
        if scenario["dies_at_s"] is not None and now_s >= scenario["dies_at_s"]:
            print("\n".join(scenario["last_words"]), flush=True)
            os._exit(1)
        if scenario["stalls_at_s"] is not None and now_s >= scenario["stalls_at_s"]:
            threading.Event().wait()
        if not scenario["silent"]:
            print(f"Loading safetensors checkpoint shards: {now_s / scenario['load_s']:.0%}", flush=True)
        time.sleep(0.05)


def main(kind: str) -> None:
    argv = sys.argv[1:]
    scenario = json.loads(os.environ["MOCK_ENGINE"])
    if scenario["ignores_sigterm"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    for _ in range(scenario["workers"]):
        subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(3600)"], start_new_session=True
        )
    load(scenario)
    name = argv[argv.index("--served-model-name") + 1]
    engine = MockEngine(kind, name, scenario)
    ThreadingHTTPServer(("127.0.0.1", int(argv[argv.index("--port") + 1])), handler(engine)).serve_forever()
