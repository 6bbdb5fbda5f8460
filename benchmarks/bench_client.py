"""What the load client itself costs: CPU time for each event of a stream, beside two plain clients.

    python benchmarks/bench_client.py [--streams 64] [--chunks 100] [--rounds 5]

A small server in a process of its own sends every stream one chunk each 20 ms. Each client reads the same
number of streams in a fresh process; the clients take turns, so that a busy moment hits all alike. CPU time
and not wall time is compared: it is what bounds a client on a busy machine. ``aiohttp-plain`` is aiohttp as
most tools use it (stock event loop, stdlib json, a session for each request); ``httpx`` is read line by line,
and is left out where neither httpx nor httpx2 is installed (``httpx_lib`` says which it was). The result goes
to ``benchmarks/results/bench_client.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from changeover import __version__

RESULT = Path(__file__).parent / "results" / "bench_client.json"
INTERVAL_S = 0.02
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = {"model": "m", "messages": [{"role": "user", "content": "q"}], "stream": True, "max_tokens": 1}


def event(tokens: int, finish: str | None) -> bytes:
    """One HTTP chunk with one event, as vLLM shapes it with ``continuous_usage_stats``."""
    choice = {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": finish}
    usage = {"prompt_tokens": 30, "completion_tokens": tokens, "total_tokens": 30 + tokens}
    head = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1790000000,
        "model": "m",
    }
    data = b"data: " + json.dumps({**head, "choices": [choice], "usage": usage}).encode() + b"\n\n"
    if finish is not None:
        data += b"data: [DONE]\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


class Stream(asyncio.Protocol):
    """A connection of the server: any POST gets ``chunks`` events, one a tick of the server."""

    live: set[Stream]
    events: list[bytes]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.sent, self.received = transport, 0, b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, body = self.received.partition(b"\r\n\r\n")
        length = [
            int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
        ]
        if found and len(body) >= sum(length):
            self.received, self.sent = b"", 0
            self.transport.write(HEAD)
            self.live.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        self.live.discard(self)

    def tick(self) -> None:
        self.transport.write(self.events[self.sent])
        self.sent += 1
        if self.sent == len(self.events):
            self.transport.write(b"0\r\n\r\n")
            self.live.discard(self)


async def serve(chunks: int) -> None:
    """Prints its port, then serves until it is killed."""
    Stream.live = set()
    Stream.events = [event(n + 1, "length" if n == chunks - 1 else None) for n in range(chunks)]
    server = await asyncio.get_running_loop().create_server(Stream, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    while True:
        await asyncio.sleep(INTERVAL_S)
        for stream in list(Stream.live):
            stream.tick()


async def read_with_changeover(url: str, streams: int) -> int:
    from changeover.bench.client import Client, Request
    from changeover.bench.load import closed_loop

    requests = [Request(n, str(n), json.dumps(BODY).encode()) for n in range(streams)]
    async with Client(url, "/v1/chat/completions", 120.0, time.monotonic) as client:
        answers = await closed_loop(client.ask, requests, streams, time.monotonic, lambda _: None)
    return sum(len(answer.arrivals) for answer in answers if answer.failure is None)


async def read_with_plain_aiohttp(url: str, streams: int) -> int:
    import aiohttp

    async def one() -> int:
        seen = 0
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/chat/completions", json=BODY) as response,
        ):
            async for line in response.content:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"]["content"]:
                    seen += time.perf_counter() > 0
        return seen

    return sum(await asyncio.gather(*(one() for _ in range(streams))))


def httpx_name() -> str | None:
    """httpx or its successor httpx2, whichever is installed."""
    return next((name for name in ("httpx", "httpx2") if find_spec(name)), None)


async def read_with_httpx(url: str, streams: int) -> int:
    httpx = import_module(httpx_name() or "httpx")
    limits = httpx.Limits(max_connections=None)

    async def one(client: Any) -> int:
        seen = 0
        async with client.stream("POST", f"{url}/v1/chat/completions", json=BODY) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"]["content"]:
                    seen += time.perf_counter() > 0
        return seen

    async with httpx.AsyncClient(limits=limits, timeout=120.0) as client:
        return sum(await asyncio.gather(*(one(client) for _ in range(streams))))


CLIENTS: dict[str, Callable[[str, int], Coroutine[Any, Any, int]]] = {
    "changeover": read_with_changeover,
    "aiohttp-plain": read_with_plain_aiohttp,
    "httpx": read_with_httpx,
}


def read(client: str, url: str, streams: int) -> dict[str, float]:
    """One round in this process: a stream to warm up (imports, code caches), then the measured ones."""
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if client == "changeover":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(CLIENTS[client](url, 1))
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        events = runner.run(CLIENTS[client](url, streams))
        return {
            "events": events,
            "cpu_s": time.process_time() - cpu_s,
            "wall_s": time.perf_counter() - wall_s,
        }


def machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), None)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "load_average": os.getloadavg(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.chunks))
    if options.read:
        print(json.dumps(read(options.read, options.url, options.streams)))
        return

    names = [name for name in CLIENTS if name != "httpx" or httpx_name()]
    sizes = ["--streams", str(options.streams), "--chunks", str(options.chunks)]
    me = [sys.executable, __file__, *sizes]
    started = machine()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    server = subprocess.Popen([*me, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        for _ in range(options.rounds):
            for name in names:
                argv = [*me, "--read", name, "--url", url]
                done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True)
                one = json.loads(done.stdout)
                expected = options.streams * options.chunks
                if one["events"] != expected:
                    raise SystemExit(f"{name}: expected {expected} events; saw {one['events']}")
                rounds[name].append(one)
    finally:
        server.kill()
        server.wait()

    clients: dict[str, dict[str, Any]] = {}
    for name, ran in rounds.items():
        costs = sorted(one["cpu_s"] / one["events"] * 1e6 for one in ran)
        clients[name] = {
            "cpu_us_per_event": {"median": statistics.median(costs), "min": costs[0], "max": costs[-1]},
            "events_per_cpu_s": 1e6 / statistics.median(costs),
            "rounds": ran,
        }
    result = {
        "what": __doc__.splitlines()[0],
        "date": datetime.now(UTC).date().isoformat(),
        "changeover": __version__,
        "machine": started,
        "streams": options.streams,
        "chunks": options.chunks,
        "interval_s": INTERVAL_S,
        "httpx_lib": httpx_name(),
        "clients": clients,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    for name, found in clients.items():
        cost = found["cpu_us_per_event"]
        print(f"{name:14} {cost['median']:7.1f} us CPU an event ({cost['min']:.1f} to {cost['max']:.1f})")


if __name__ == "__main__":
    main()
