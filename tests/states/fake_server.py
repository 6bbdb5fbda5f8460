"""A capture server that answers from a rule instead of a model, and misbehaves where a prompt says so.

Its "model" has random output vectors; the last state of a row is the vector of the token that follows, so
that the probe finds what it must find. Words in a prompt choose the fault (``FAULTS``).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from safetensors.numpy import save_file

VOCAB, HIDDEN, LAYERS = 100, 16, 8
BOUNDARIES = (2, 4, 5)


def bf16(values: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def output_vectors() -> np.ndarray:
    vectors = np.random.default_rng(7).standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def write_model(folder: Path) -> Path:
    """The folder that the probe reads: config.json and the output vectors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": HIDDEN, "vocab_size": VOCAB}))
    save_file({"lm_head.weight": output_vectors()}, folder / "model.safetensors")
    return folder


def write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> int:
    """By hand, since numpy has no bf16: name -> (safetensors dtype, array)."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    content = (
        len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for _, array in tensors.values())
    )
    temporary = path.with_name(f".{path.name}.1.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)
    return len(content)


@dataclass
class FakeServer:
    capture_dir: Path
    delay_s: float = 0.0
    asked: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    at_once: int = 0
    most_at_once: int = 0
    most_staged_bytes: int = 0
    die_after: int | None = None

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        text = body["messages"][-1]["content"]
        self.asked[text] += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.delay_s)
            if self.die_after is not None and sum(self.answered.values()) >= self.die_after:
                return web.json_response({"error": {"message": "draining"}}, status=503)
            if "poison" in text:
                return web.json_response({"error": {"message": "prompt too long"}}, status=400)
            if "flaky" in text and self.asked[text] < 3:
                return web.json_response({"error": {"message": "try again"}}, status=500)
            if "hang up" in text:
                assert request.transport is not None
                request.transport.close()
            answer = self.answer(text, body)
            self.answered[text] += 1
            return web.json_response(answer)
        finally:
            self.at_once -= 1

    def answer(self, text: str, body: dict[str, Any]) -> dict[str, Any]:
        random = np.random.default_rng(list(hashlib.sha256(text.encode()).digest()))
        prompt_ids = random.integers(0, VOCAB, 5 + len(text) % 17)
        output_ids = random.integers(0, VOCAB, 1 if "short" in text else body["max_tokens"] - len(text) % 3)
        every = np.concatenate([prompt_ids, output_ids]).astype(np.int64)
        rows = len(every) - 1
        last = bf16(output_vectors()[every[1:]])
        aux = bf16(random.standard_normal((rows, len(BOUNDARIES), HIDDEN)))
        boundaries, fed = list(BOUNDARIES), every[:-1]
        if "not a number" in text:
            aux[3, 1, 2] = 0x7FC0
        if "zero row" in text:
            last[rows - 1] = 0
        if "shifted" in text:
            last = np.roll(last, 1, axis=0)
        if "other layers" in text:
            boundaries = [1, 3, 4]
        if "other ids" in text:
            fed = fed[::-1].copy()
        if "chunked" in text:
            aux = aux[:-2]
        path = self.capture_dir / body["capture"]["path"]
        size = write_safetensors(
            path, {"input_ids": ("I64", fed), "aux": ("BF16", aux), "last": ("BF16", last)}
        )
        if "truncated" in text:
            path.write_bytes(path.read_bytes()[:-10])
        if "no file" in text:
            path.unlink()
        staged = sum(file.stat().st_size for file in self.capture_dir.iterdir() if file.exists())
        self.most_staged_bytes = max(self.most_staged_bytes, staged)
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(output_ids)}
        return {
            "choices": [
                {"message": {"role": "assistant", "content": f"re: {text}"}, "finish_reason": "length"}
            ],
            "usage": usage,
            "capture": {
                "path": path.name,
                "tokens": rows,
                "prompt_tokens": len(prompt_ids),
                "boundaries": boundaries,
                "last_norm": "pre" if "before the norm" in text else "post",
                "bytes": size,
                "output_token_ids": output_ids.tolist(),
            },
        }


@contextmanager
def serving(server: FakeServer) -> Iterator[str]:
    """Run ``server`` on a free port in a thread; yields its url."""
    loop = asyncio.new_event_loop()
    started = threading.Event()
    port: list[int] = []

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", server.chat)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port.append(site._server.sockets[0].getsockname()[1])
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield f"http://127.0.0.1:{port[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
