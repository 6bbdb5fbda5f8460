"""The embedded server as a process: routes, refusals, capture, drain, signals. On the tiny random model."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from changeover.teardown.drains import read_gauge
from tests.engine_fixtures import RunningServer, free_port, start_embedded
from tests.engines.drafters import write_drafter

LONG = {"prompt": [5, 6, 7], "max_tokens": 1500, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="module")
def server(
    tiny_model_dir: Path, captures: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    with start_embedded(
        tiny_model_dir, "--capture-dir", str(captures), "--aux-boundaries", "2,4,5", "--max-concurrency", "2",
        "--served-model-name", "tiny", log=log,
    ) as running:  # fmt: skip
        yield running


def until(condition: Any, what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"waited {timeout_s} s for {what}")


def in_background(server: RunningServer, body: Any) -> tuple[threading.Thread, list[tuple[int, Any]]]:
    answers: list[tuple[int, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
    thread.start()
    return thread, answers


def test_says_what_it_serves(server: RunningServer) -> None:
    assert server.get("/health") == (200, '{"status": "ready"}')
    status, text = server.get("/v1/models")
    assert status == 200 and [model["id"] for model in json.loads(text)["data"]] == ["tiny"]


def test_a_completion_and_its_stream_say_the_same(server: RunningServer) -> None:
    body = {
        "model": "tiny",
        "prompt": "The capital of France",
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    }
    status, whole = server.post("/v1/completions", body)
    assert status == 200 and whole["object"] == "text_completion"
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 24
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + 24
    assert "speculation" not in whole["usage"]
    events = server.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole["choices"][0]["text"]
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    assert len({event["id"] for event in events}) == 1


def test_a_stream_without_include_usage_has_none(server: RunningServer) -> None:
    events = server.stream("/v1/completions", {"prompt": [1, 2], "max_tokens": 2, "temperature": 0})
    assert all("usage" not in event for event in events)


def test_chat_goes_through_the_models_own_template(server: RunningServer, tiny_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "List three fruits"}]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    settings = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    status, chat = server.post("/v1/chat/completions", {"messages": messages, **settings})
    assert status == 200 and chat["object"] == "chat.completion"
    _, completion = server.post("/v1/completions", {"prompt": ids, **settings})
    assert chat["choices"][0]["message"] == {
        "role": "assistant", "content": completion["choices"][0]["text"],
    }  # fmt: skip
    assert chat["usage"] == completion["usage"]
    events = server.stream("/v1/chat/completions", {"messages": messages, **settings})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    streamed = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert streamed == chat["choices"][0]["message"]["content"]


def test_a_capture_is_complete_when_the_answer_ends(server: RunningServer, captures: Path) -> None:
    from safetensors import safe_open

    body = {"prompt": list(range(20, 60)), "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    _, whole = server.post("/v1/completions", {**body, "capture": {"path": "a.safetensors"}})
    tail = server.stream("/v1/completions", {**body, "capture": {"path": "b.safetensors"}})[-1]
    told = whole["capture"]
    assert {**tail["capture"], "path": "a.safetensors"} == told
    assert (told["tokens"], told["prompt_tokens"], told["last_norm"]) == (48, 40, "post")
    assert told["boundaries"] == [2, 4, 5] and len(told["output_token_ids"]) == 9
    assert told["bytes"] == (captures / "a.safetensors").stat().st_size
    assert (captures / "a.safetensors").read_bytes() == (captures / "b.safetensors").read_bytes()
    with safe_open(captures / "a.safetensors", "pt") as file:
        assert file.get_tensor("input_ids").tolist() == [*range(20, 60), *told["output_token_ids"][:-1]]
        assert file.get_slice("aux").get_shape() == [48, 3, 64]
        assert file.get_slice("last").get_shape() == [48, 64]
    assert sorted(file.name for file in captures.iterdir()) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/completions", {"prompt": "Hi", "model": "gpt-4"}, 404, "'tiny'"),
        ("/v1/completions", {"max_tokens": 3}, 400, "'prompt'"),
        ("/v1/completions", {"prompt": [448]}, 400, "0 to 447"),
        ("/v1/completions", {"prompt": [-1]}, 400, "0 to 447"),
        ("/v1/completions", {"prompt": []}, 400, "no tokens"),
        ("/v1/completions", {"prompt": ""}, 400, "no tokens"),
        ("/v1/completions", {"prompt": [1] * 2048, "max_tokens": 1}, 400, "2048"),
        ("/v1/completions", {"prompt": [1] * 2000, "max_tokens": 49}, 400, "49 more"),
        (
            "/v1/completions",
            {"prompt": [1], "capture": {"path": "../../etc/x.safetensors"}},
            400,
            "bare file name",
        ),
        ("/v1/chat/completions", {"messages": []}, 400, "'messages'"),
        ("/v1/completions", "not an object", 400, "JSON object"),
        ("/v1/nothing", {}, 404, "/v1/nothing"),
        ("/v1/models", {}, 405, "Method Not Allowed"),
    ],
)
def test_refusals_are_json_in_openais_shape(
    server: RunningServer, path: str, body: Any, status: int, said: str
) -> None:
    got, answer = server.post(path, body)
    assert got == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert said in answer["error"]["message"] and answer["error"]["code"] == status


def test_a_body_that_is_no_json_is_refused(server: RunningServer) -> None:
    from tests.engine_fixtures import _http

    status, text = _http(server.url + "/v1/completions", b"{nonsense")
    assert status == 400 and "JSON" in json.loads(text)["error"]["message"]


def test_metrics_count_what_was_served(server: RunningServer) -> None:
    before = server.metric("generation_tokens_total"), server.metric("prompt_tokens_total")
    server.post(
        "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 10, "temperature": 0, "ignore_eos": True}
    )
    assert server.metric("generation_tokens_total") - before[0] == 10
    assert server.metric("prompt_tokens_total") - before[1] == 3
    assert server.metric("spec_decode_num_drafts_total") == 0


def test_more_requests_than_places_wait_and_all_are_served(server: RunningServer) -> None:
    body = {"prompt": [7, 8], "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    started = [in_background(server, body) for _ in range(5)]

    def full() -> bool:
        text = server.get("/metrics")[1]
        return (
            read_gauge(text, "changeover:num_requests_running") == 2
            and read_gauge(text, "changeover:num_requests_waiting") == 3
        )

    until(full, "two to run and three to wait")
    for thread, _ in started:
        thread.join()
    texts = {answers[0][1]["choices"][0]["text"] for _, answers in started}
    assert len(texts) == 1
    assert server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0


def test_a_client_that_leaves_frees_its_place(server: RunningServer) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    body = json.dumps({**LONG, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for wanted in (b"data:", b""):  # one leaves in the middle of its stream, one before its answer
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(
                head + body if wanted else head + body.replace(b'"stream": true', b'"stream":false')
            )
            until(lambda: server.metric("num_requests_running") == 1, "the request to run")
            seen = b""
            while wanted not in seen:
                seen += client.recv(4096)
        until(lambda: server.metric("num_requests_running") == 0, "the place to be free", 10.0)
    assert server.metric("generation_tokens_total") < 1500 * 2


def test_capture_without_a_folder_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    """And with a drafter: it counts drafts, changes no token, and does not capture."""
    drafter = write_drafter(tmp_path / "drafter", tiny_model_dir)
    with start_embedded(
        tiny_model_dir, "--drafter", str(drafter), "--draft-tokens", "2", log=tmp_path / "log"
    ) as server:
        status, answer = server.post("/v1/completions", {**LONG, "capture": {"path": "a.safetensors"}})
        assert status == 400 and "--capture-dir" in answer["error"]["message"]
        _, answer = server.post("/v1/completions", {**LONG, "max_tokens": 30})
        assert answer["usage"]["completion_tokens"] == 30
        told = answer["usage"]["speculation"]
        assert told == {name: server.metric(f"spec_decode_num_{name}_total") for name in told}
        drafts, drafted, accepted = (told[name] for name in ("drafts", "draft_tokens", "accepted_tokens"))
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = server.stream("/v1/completions", {**LONG, "max_tokens": 30, "stream_options": options})
        assert events[-1]["usage"] == answer["usage"]
        assert all("speculation" not in event["usage"] for event in events[:-1])
        assert drafts > 0 and drafted <= 2 * drafts and 28 <= drafts + accepted <= 29


def test_drain_refuses_new_work_and_finishes_what_runs(tiny_model_dir: Path, tmp_path: Path) -> None:
    with start_embedded(tiny_model_dir, log=tmp_path / "log") as server:
        thread, answers = in_background(server, LONG)
        until(lambda: server.metric("num_requests_running") == 1, "the request to run")
        status, told = server.post("/drain", {})
        assert status == 200 and told == {"status": "draining", "running": 1, "waiting": 0}
        assert server.get("/health") == (503, '{"status": "draining"}')
        refused, error = server.post("/v1/completions", LONG)
        assert refused == 503 and "draining" in error["error"]["message"]
        thread.join()
        assert answers[0][0] == 200 and answers[0][1]["usage"]["completion_tokens"] == 1500
        assert server.metric("num_requests_running") == 0
        assert server.process.poll() is None  # drained, not stopped


def test_sigterm_finishes_what_runs_and_ends_with_0(tiny_model_dir: Path, tmp_path: Path) -> None:
    with start_embedded(tiny_model_dir, log=tmp_path / "log") as server:
        thread, answers = in_background(server, LONG)
        until(lambda: server.metric("num_requests_running") == 1, "the request to run")
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/health")[0] == 503, "the server to drain")
        assert server.post("/v1/completions", LONG)[0] == 503
        thread.join()
        assert answers[0][0] == 200 and answers[0][1]["usage"]["completion_tokens"] == 1500
        assert server.process.wait(10) == 0


def test_a_second_sigterm_ends_sooner(tiny_model_dir: Path, tmp_path: Path) -> None:
    with start_embedded(tiny_model_dir, log=tmp_path / "log") as server:
        thread, answers = in_background(server, LONG)
        until(lambda: server.metric("num_requests_running") == 1, "the request to run")
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/health")[0] == 503, "the server to drain")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        thread.join()
        assert answers[0][0] == 500 and "stopping" in answers[0][1]["error"]["message"]


def test_sigterm_while_loading_ends_at_once(tiny_model_dir: Path, tmp_path: Path) -> None:
    with start_embedded(tiny_model_dir, log=tmp_path / "log", wait=False) as server:
        until(lambda: "listening" in server.log.read_text(), "the server to listen")
        assert server.get("/health") == (503, '{"status": "loading"}')
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0


def test_a_model_that_is_not_there_ends_it_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with start_embedded(tmp_path / "empty", log=tmp_path / "log", wait=False) as server:
        assert server.process.wait(120) != 0
    assert "ERROR cannot serve" in (tmp_path / "log").read_text()


def test_a_port_in_use_ends_it_with_a_reason(tiny_model_dir: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        with start_embedded(
            tiny_model_dir, "--port", str(taken.getsockname()[1]), log=tmp_path / "log", wait=False
        ) as server:
            assert server.process.wait(60) == 2
    assert "cannot listen" in (tmp_path / "log").read_text()
