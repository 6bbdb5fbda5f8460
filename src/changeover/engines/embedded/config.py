"""The server's command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServerConfig:
    model: Path
    served_name: str
    host: str
    port: int
    device: str
    dtype: str
    threads: int
    max_concurrency: int
    max_model_len: int | None
    prefill_chunk_tokens: int
    capture_dir: Path | None
    aux_boundaries: tuple[int, ...]
    drafter: Path | None
    draft_tokens: int


def parse_arguments(argv: Sequence[str]) -> ServerConfig:
    parser = argparse.ArgumentParser(
        prog="python -m changeover.engines.embedded",
        description="OpenAI-compatible server on transformers: hidden-state capture, EAGLE-3 decoding.",
    )
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--served-model-name", default=None, help="default: the folder's name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=None, help="default: physical cores")
    parser.add_argument("--max-concurrency", type=int, default=16, help="requests generated at a time")
    parser.add_argument("--max-model-len", type=int, default=None, help="default: the model's own context")
    parser.add_argument("--prefill-chunk-tokens", type=int, default=256, help="prompt tokens a step")
    parser.add_argument("--capture-dir", type=Path, default=None, help="folder for captured states")
    parser.add_argument("--aux-boundaries", default=None, help="comma separated; default 2, L//2, L-3")
    parser.add_argument("--drafter", type=Path, default=None, help="exported EAGLE-3 folder")
    parser.add_argument("--draft-tokens", type=int, default=3)
    options = parser.parse_args(argv)
    for name in ("max_concurrency", "prefill_chunk_tokens", "draft_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    if options.aux_boundaries is not None and options.capture_dir is None:
        parser.error("--aux-boundaries needs --capture-dir")
    if options.drafter is not None and options.capture_dir is not None:
        parser.error(
            "--drafter and --capture-dir exclude each other: states are captured from the target alone"
        )
    try:
        boundaries = tuple(int(part) for part in (options.aux_boundaries or "").split(",") if part.strip())
    except ValueError:
        parser.error(f"--aux-boundaries must be numbers separated by commas, not {options.aux_boundaries!r}")
    return ServerConfig(
        model=options.model.resolve(),
        served_name=options.served_model_name or options.model.resolve().name,
        host=options.host,
        port=options.port,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads or physical_cores(),
        max_concurrency=options.max_concurrency,
        max_model_len=options.max_model_len,
        prefill_chunk_tokens=options.prefill_chunk_tokens,
        capture_dir=options.capture_dir.resolve() if options.capture_dir else None,
        aux_boundaries=boundaries,
        drafter=options.drafter.resolve() if options.drafter else None,
        draft_tokens=options.draft_tokens,
    )


def physical_cores() -> int:
    """Cores that this process may use, hyper-threads of one core counted once (two on one core slow a GEMM
    down).
    """
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.is_file() else str(cpu))
    return max(1, len(cores))
