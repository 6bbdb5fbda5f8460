"""Writing and randomly reading hidden states: our store beside one file a sample, as two other tools keep them.

    python benchmarks/states_io.py [--tokens 130 --hidden 576 --samples 200] [--rounds 5] [--folder DIR]

The contenders hold the same arrays and take turns, in one process and one thread; who begins changes each round.

- ``changeover``: shards of 64 MiB, synced, renamed, indexed; each read is checked against its hash
- ``torch.save``: one ``.ckpt`` a sample straight to its final name, as SpecForge writes; no sync, no hash
- ``safetensors``: one ``.safetensors`` a sample, as speculators keeps them; no sync, no hash
- ``... + fsync``: the same two as durable as the store (temporary name, fsync, rename), still without a hash

``write`` ends when the last sample is handed over (and synced, where the contender syncs). ``warm`` reads come
from the page cache; ``cold`` reads follow POSIX_FADV_DONTNEED on every file. Each sample is copied into one
buffer, as a trainer does into its batch: without that, safetensors' memory-mapped tensors are not read at all.
``open`` is the time to learn which samples there are. CPU time is of the process. The result goes to
``benchmarks/results/states_io.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from changeover import __version__
from changeover.states.store import Manifest, Sample, StatesReader, StatesWriter

RESULT = Path(__file__).parent / "results" / "states_io.json"
BOUNDARIES = (2, 15, 27)
MEASURES = ("write", "open", "warm", "cold")


class Contender(Protocol):
    name: str

    def write(self, folder: Path, samples: list[Sample]) -> None: ...
    def open(self, folder: Path) -> Callable[[int], list[torch.Tensor]]:
        """Learn what is there; returns the function that gives the arrays of sample i."""
        ...


class OurStore:
    name = "changeover"

    def __init__(self, hidden: int) -> None:
        self._manifest = Manifest(hidden=hidden, layers=30, vocab=49152, boundaries=BOUNDARIES)

    def write(self, folder: Path, samples: list[Sample]) -> None:
        with StatesWriter.create(folder, self._manifest) as writer:
            for sample in samples:
                writer.add(sample)

    def open(self, folder: Path) -> Callable[[int], list[torch.Tensor]]:
        reader = StatesReader(folder)

        def read(i: int) -> list[torch.Tensor]:
            sample = reader.read(i)
            arrays = (
                sample.input_ids,
                sample.loss_mask,
                sample.aux.view(np.int16),
                sample.last.view(np.int16),
            )
            return [torch.from_numpy(array) for array in arrays]

        return read


class FileEach:
    """One file a sample, straight to its final name."""

    def __init__(
        self,
        name: str,
        ending: str,
        save: Callable[..., None],
        load: Callable[[Path], dict[str, torch.Tensor]],
    ) -> None:
        self.name = name
        self._ending = ending
        self._save = save
        self._load = load

    def write(self, folder: Path, samples: list[Sample]) -> None:
        folder.mkdir()
        for i, sample in enumerate(samples):
            self._save(as_tensors(sample), folder / f"data_{i:06d}{self._ending}")

    def open(self, folder: Path) -> Callable[[int], list[torch.Tensor]]:
        paths = sorted(folder.iterdir())
        return lambda i: list(self._load(paths[i]).values())


class DurableFileEach(FileEach):
    """The same, as durable as the store's samples."""

    def write(self, folder: Path, samples: list[Sample]) -> None:
        folder.mkdir()
        for i, sample in enumerate(samples):
            path = folder / f"data_{i:06d}{self._ending}"
            temporary = path.with_suffix(".partial")
            self._save(as_tensors(sample), temporary)
            fd = os.open(temporary, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
            temporary.replace(path)
        fd = os.open(folder, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def as_tensors(sample: Sample) -> dict[str, torch.Tensor]:
    """In SpecForge's names and types (input_ids, loss_mask, hidden_state, aux_hidden_state)."""
    bf16 = torch.bfloat16
    return {
        "input_ids": torch.from_numpy(sample.input_ids),
        "loss_mask": torch.from_numpy(sample.loss_mask).long(),
        "hidden_state": torch.from_numpy(sample.last.view(np.int16)).view(bf16)[None],
        "aux_hidden_state": torch.from_numpy(sample.aux.view(np.int16)).view(bf16).flatten(1)[None],
    }


def contenders(hidden: int) -> list[Contender]:
    def torch_load(path: Path) -> dict[str, torch.Tensor]:
        return dict(torch.load(path, weights_only=True))

    return [
        OurStore(hidden),
        FileEach("torch.save", ".ckpt", torch.save, torch_load),
        FileEach("safetensors", ".safetensors", save_file, load_file),
        DurableFileEach("torch.save + fsync", ".ckpt", torch.save, torch_load),
        DurableFileEach("safetensors + fsync", ".safetensors", save_file, load_file),
    ]


def make_samples(count: int, tokens: int, hidden: int) -> list[Sample]:
    """Lengths from half to one and a half of ``tokens``; normal values rounded to bf16."""
    rng = np.random.default_rng(0)

    def bf16(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)

    lengths = rng.integers(tokens // 2, tokens + tokens // 2 + 1, count)
    return [
        Sample(
            id=f"sample-{i:06d}",
            input_ids=rng.integers(0, 49152, length, dtype=np.int64),
            loss_mask=(np.arange(length) >= length // 3).astype(np.uint8),
            aux=bf16(length, len(BOUNDARIES), hidden),
            last=bf16(length, hidden),
        )
        for i, length in enumerate(lengths.tolist())
    ]


def timed(work: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    value = work()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}, value


def drop_from_cache(folder: Path) -> None:
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def one_round(
    contender: Contender, folder: Path, samples: list[Sample], seed: int
) -> dict[str, dict[str, float]]:
    order = list(range(len(samples)))
    random.Random(seed).shuffle(order)
    took: dict[str, dict[str, float]] = {}
    batch = torch.zeros(max(s.aux.nbytes + s.last.nbytes + 16 * s.tokens for s in samples), dtype=torch.uint8)

    def fill_batch(read: Callable[[int], list[torch.Tensor]]) -> None:
        for i in order:
            end = 0
            for tensor in read(i):
                flat = tensor.reshape(-1).view(torch.uint8)
                batch[end : end + len(flat)] = flat
                end += len(flat)

    os.sync()  # what an earlier contender left to the kernel is not this one's to wait for
    took["write"], _ = timed(lambda: contender.write(folder, samples))
    took["open"], read = timed(lambda: contender.open(folder))
    took["warm"], _ = timed(lambda: fill_batch(read))
    drop_from_cache(folder)
    took["cold"], _ = timed(lambda: fill_batch(read))
    took["size"] = {"bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())}
    return took


def summarise(rounds: list[dict[str, dict[str, float]]], megabytes: float, count: int) -> dict[str, Any]:
    """Medians over the rounds, with the least and the most; rates in MB (10^6 bytes) of arrays a second."""
    summary: dict[str, Any] = {}
    for measure in MEASURES:
        walls = [r[measure]["wall_s"] for r in rounds]
        cpu_ms = statistics.median(r[measure]["cpu_s"] for r in rounds) / count * 1000
        if measure == "open":
            summary["open_ms"] = round(statistics.median(walls) * 1000, 3)
            continue
        summary[measure] = {
            "mb_per_s": round(megabytes / statistics.median(walls), 1),
            "mb_per_s_range": [round(megabytes / max(walls), 1), round(megabytes / min(walls), 1)],
            "cpu_ms_per_sample": round(cpu_ms, 4),
        }
    summary["bytes_over_arrays"] = round(rounds[0]["size"]["bytes"] / (megabytes * 1e6), 4)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=130)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; its disk is what is measured"
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()

    torch.set_num_threads(1)
    samples = make_samples(options.samples, options.tokens, options.hidden)
    array_bytes = sum(s.aux.nbytes + s.last.nbytes + s.input_ids.nbytes + s.loss_mask.nbytes for s in samples)
    rivals = contenders(options.hidden)
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {rival.name: [] for rival in rivals}
    root = Path(tempfile.mkdtemp(prefix="states-io-", dir=options.folder))
    try:
        for number in range(options.rounds + 1):  # the first warms up imports and the allocator; not counted
            turn = number % len(rivals)
            for rival in rivals[turn:] + rivals[:turn]:
                took = one_round(rival, root / "data", samples, seed=number)
                shutil.rmtree(root / "data")
                if number:
                    rounds[rival.name].append(took)
            print(f"round {number} of {options.rounds}", flush=True)
    finally:
        shutil.rmtree(root)

    result = {
        "what": __doc__.splitlines()[0],
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {
            "cpu_cores": os.cpu_count(),
            "platform": platform.platform(),
            "load_average": os.getloadavg(),
        },
        "versions": {"changeover": __version__, **{name: version(name) for name in ("torch", "safetensors")}},
        "shape": {
            "samples": options.samples,
            "tokens_mean": options.tokens,
            "hidden": options.hidden,
            "boundaries": len(BOUNDARIES),
            "mean_sample_bytes": array_bytes // options.samples,
        },
        "rounds": options.rounds,
        "contenders": {
            name: summarise(taken, array_bytes / 1e6, options.samples) for name, taken in rounds.items()
        },
    }
    previous = json.loads(options.out.read_text()) if options.out.exists() else {}
    key = f"{options.samples} samples of {options.tokens} tokens x {len(BOUNDARIES) + 1} x {options.hidden}"
    options.out.write_text(json.dumps({**previous, key: result}, indent=2) + "\n")
    print(json.dumps(result["contenders"], indent=2))


if __name__ == "__main__":
    main()
