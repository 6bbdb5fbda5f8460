"""Write down what a real engine answers, for its mock: ``python -m tests.mock_engines.record sglang|vllm FOLDER``.

Two data-parallel ranks, the built-in model, on a CPU (``CHANGEOVER_ENGINES``,
``CHANGEOVER_MODELS``). Idle answers are taken first, then those while two requests run.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from changeover.engines.versions import installed_version
from tests.engines.drafters import write_drafter
from tests.mock_engines import RECORDED
from tests.real_engines import servers
from tests.real_engines.servers import clients, started

ASKED = {
    "sglang": [
        ("GET", "/health"),
        ("GET", "/v1/models"),
        ("GET", "/v1/loads?include=core"),
        ("POST", "/flush_cache"),
        ("GET", "/metrics"),
    ],
    "vllm": [("GET", "/health"), ("GET", "/v1/models"), ("POST", "/pause?mode=wait"), ("GET", "/metrics")],
}
"""What Changeover asks of each while it waits, drains and measures; ``/pause`` only exists in vLLM's developer mode."""
KEPT_METRICS = (
    "num_requests_running",
    "num_requests_waiting",
    "spec_decode",
    "generation_tokens_total",
    "spec_",
)
KEPT_METRICS += ("num_running_reqs", "num_queue_reqs")


def ask(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """One answer: status, content type, body."""
    data = None if method == "GET" else json.dumps(body or {}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, method=method)
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, text, kind = answer.status, answer.read().decode(), answer.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        status, text, kind = error.code, error.read().decode(), error.headers["Content-Type"]
    if path == "/metrics":
        text = (
            "\n".join(line for line in text.splitlines() if any(name in line for name in KEPT_METRICS)) + "\n"
        )
    return {"status": status, "content_type": kind, "body": text}


def engine_of(kind: str, home: Path, model: Path, folder: Path) -> servers.Engine:
    """vLLM counts what it drafts for each rank; SGLang says it in each answer, which the real one is tested for."""
    if kind == "sglang":
        flags = ["--dp-size", "2", "--enable-metrics"]
    else:
        drafter = str(write_drafter(folder / "drafter", model))
        speculation = {"method": "eagle3", "model": drafter, "num_speculative_tokens": 3}
        flags = ["--data-parallel-size", "2", "--speculative-config", json.dumps(speculation)]
    made = getattr(servers, kind)(home, model)
    made.env["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"  # a CPU for each rank
    plain = made.argv
    made.argv = lambda port: [*plain(port), *flags]
    return made  # type: ignore[no-any-return]


def main(kind: str, folder: Path) -> None:
    home, model = (
        Path(os.environ["CHANGEOVER_ENGINES"]),
        Path(os.environ["CHANGEOVER_MODELS"]) / "smollm2-135m-instruct",
    )
    engine = engine_of(kind, home, model, folder)
    completion = {"model": str(model), "prompt": "Hello", "max_tokens": 1, "temperature": 0}
    chat = {"model": str(model), "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6}
    chat |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    with started(engine, folder) as server:
        answers = {
            "POST /v1/completions": ask(server.port, "POST", "/v1/completions", completion),
            "POST /v1/chat/completions": ask(server.port, "POST", "/v1/chat/completions", chat),
        }
        time.sleep(2.0)  # SGLang's /health answers 503 until its warm-up has ended
        idle = answers | {f"{method} {path}": ask(server.port, method, path) for method, path in ASKED[kind]}
        with clients(server.port, str(model), count=2, tokens=500):
            time.sleep(4.0)  # both are being answered by then
            busy = {f"{method} {path}": ask(server.port, method, path) for method, path in ASKED[kind]}
            if kind == "sglang":
                body = {"rid": "", "abort_all": True}
                busy["POST /abort_request"] = ask(server.port, "POST", "/abort_request", body)
        after = {"GET /metrics": ask(server.port, "GET", "/metrics")}
    version = installed_version(kind, str(home / kind / "bin/python"))
    record = {
        "engine": kind,
        "version": version,
        "argv": engine.argv(0)[1:],
        "idle": idle,
        "busy": busy,
        "after": after,
    }
    text = json.dumps(record, indent=1).replace(str(home), "HOME").replace(str(folder), "FOLDER")
    (RECORDED / f"{kind}.json").write_text(text.replace(str(model), "MODEL") + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
