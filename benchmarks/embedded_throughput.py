"""Tokens per second of the embedded server against plain ``generate``, on the same weights, prompts and threads.

    python benchmarks/embedded_throughput.py MODEL_DIR --out benchmarks/results/embedded_throughput.json

Each level sends as many greedy requests at a time as it says, every one of ``--tokens`` tokens (``ignore_eos``), over
HTTP to the server's own process; plain ``generate`` gets the same prompts as one left-padded batch. Beside the wall
clock stands the processor time of the process that computed, since on a machine that others use too only that repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the server does; for both sides

QUESTIONS = (
    "Explain why the sky is blue.",
    "Write a short letter to a friend about the weather.",
    "What is the difference between a cat and a dog?",
    "List five fruits and say where each of them grows.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--note", default="", help="what else the machine did meanwhile")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "model": options.model.name,
        "settings": {
            "tokens": options.tokens,
            "threads": options.threads,
            "dtype": "float32",
            "greedy": True,
        },
        "note": options.note,
        "load_average": {"before": os.getloadavg()[0]},
        "server": measure_server(options),
        "generate": measure_generate(options),
    }
    result["load_average"]["after"] = os.getloadavg()[0]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    for side in ("server", "generate"):
        for level, figures in result[side].items():
            print(f"{side:9} {level:>3} at a time: {figures}")


def machine() -> dict[str, Any]:
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = cpu[0].split(":", 1)[1].strip() if cpu else platform.machine()
    return {"cpu": name, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}


def summary(walls_s: list[float], cpus_s: list[float], tokens: int) -> dict[str, float]:
    """Tokens a second: the best run by the wall clock, and all runs by processor time."""
    return {
        "tokens_per_s_best": round(tokens / min(walls_s), 1),
        "tokens_per_s_worst": round(tokens / max(walls_s), 1),
        "tokens_per_cpu_s": round(tokens * len(cpus_s) / sum(cpus_s), 1),
    }


def prompts(count: int) -> list[list[dict[str, str]]]:
    return [
        [{"role": "user", "content": f"{QUESTIONS[index % len(QUESTIONS)]} ({index})"}]
        for index in range(count)
    ]


def measure_server(options: argparse.Namespace) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "changeover.engines.embedded", "--model", str(options.model)]
    argv += ["--port", str(port), "--threads", str(options.threads), "--device", "cpu"]
    server = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    try:
        return asyncio.run(load_server(options, f"http://127.0.0.1:{port}", server))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


async def load_server(
    options: argparse.Namespace, url: str, server: subprocess.Popen[bytes]
) -> dict[str, Any]:
    import aiohttp

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as session:

        async def ask(messages: list[dict[str, str]]) -> None:
            body = {
                "messages": messages, "temperature": 0, "max_tokens": options.tokens, "ignore_eos": True,
            }  # fmt: skip
            async with session.post(url + "/v1/chat/completions", json=body) as answer:
                got = (await answer.json())["usage"]["completion_tokens"]
                if got != options.tokens:
                    raise RuntimeError(f"expected {options.tokens} tokens, saw {got}")

        deadline = time.monotonic() + 300
        while True:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not become ready")
            try:
                async with session.get(url + "/health") as answer:
                    if answer.status == 200:
                        break
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
        found = {}
        for level in options.levels:
            await ask(prompts(1)[0])
            walls, cpus = [], []
            for _ in range(options.repeats):
                wall, cpu = time.monotonic(), cpu_s(server.pid)
                await asyncio.gather(*(ask(one) for one in prompts(level)))
                walls.append(time.monotonic() - wall)
                cpus.append(cpu_s(server.pid) - cpu)
            found[str(level)] = summary(walls, cpus, level * options.tokens)
        return found


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_generate(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(options.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    found = {}
    for level in options.levels:
        texts = [
            tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True)
            for one in prompts(level)
        ]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        walls, cpus = [], []
        for _ in range(options.repeats):
            wall, cpu = time.monotonic(), time.process_time()
            model.generate(
                **batch, max_new_tokens=options.tokens, min_new_tokens=options.tokens, do_sample=False
            )
            walls.append(time.monotonic() - wall)
            cpus.append(time.process_time() - cpu)
        found[str(level)] = summary(walls, cpus, level * options.tokens)
    return found


if __name__ == "__main__":
    main()
