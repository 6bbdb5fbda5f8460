"""The stages of a load, from lines as the real engines write them (shortened)."""

from pathlib import Path

import pytest

from changeover.engines.readiness import Pulse, stage_progress
from changeover.engines.stages import CAPTURING, LOADING, WARMING_UP, LoadStage, LogStages

SGLANG = (
    ("[2026-12-07 12:46:28 DP0] Load weight begin. avail mem=20.47 GB\n", LoadStage(LOADING)),
    ("Multi-thread loading shards: 100% Completed | 1/1 [00:01<00:00,  1.37s/it]\n", LoadStage(LOADING)),
    (
        "[2026-12-07 12:46:30 DP0] Load weight end. elapsed=1.47 s, type=LlamaForCausalLM\n",
        LoadStage(WARMING_UP),
    ),
    ("[2026-12-07 12:46:31] Capture target decode CUDA graph begin. backend=full\n", LoadStage(CAPTURING)),
    ("\rCapturing batches (bs=160 avail_mem=12.21 GB):   3%|3  | 1/35 [00:00<00:31]", LoadStage(CAPTURING)),
    (
        "\rCapturing batches (bs=152 avail_mem=12.01 GB):  11%|#  | 4/35 [00:03<00:20]\r",
        LoadStage(CAPTURING, 4, 35),
    ),
    ("\n[2026-12-07 12:46:40] Capture target decode CUDA graph end. bs=[1]\n", LoadStage(WARMING_UP)),
    (
        "[2026-12-07 12:46:41] Capture cuda graph begin. This can take up to several minutes.\n",
        LoadStage(CAPTURING),
    ),
)
VLLM = (
    ("(Worker pid=1) INFO [cpu_model_runner.py:68] Starting to load model /m...\n", LoadStage(LOADING)),
    (
        "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:03<00:00,  3.05s/it]\r",
        LoadStage(LOADING),
    ),
    (
        "(Worker pid=1) INFO [default_loader.py:501] Loading weights took 3.06 seconds\n",
        LoadStage(WARMING_UP),
    ),
    ("Capturing CUDA graphs (decode, FULL):  57%|##  | 20/35 [00:01<00:00]\r", LoadStage(CAPTURING, 20, 35)),
    ("INFO [model_runner.py:1128] Graph capturing finished in 2 secs, took 0.5 GiB\n", LoadStage(WARMING_UP)),
    ("INFO 12-07 12:42:10 nothing that is known\n", LoadStage(WARMING_UP)),
)


@pytest.mark.parametrize("lines", [SGLANG, VLLM], ids=["sglang", "vllm"])
def test_a_growing_log_tells_the_stage(tmp_path: Path, lines: tuple[tuple[str, LoadStage], ...]) -> None:
    log = tmp_path / "log"
    stages = LogStages(log)
    assert stages.look() == LoadStage(LOADING), "before there is a log"
    for text, expected in lines:
        with log.open("a") as file:
            file.write(text)
        assert stages.look() == expected, text


def test_only_the_end_of_a_huge_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("x" * 10_000_000 + "\nGraph capturing finished in 2 secs\n")
    assert LogStages(log).look() == LoadStage(WARMING_UP)


def test_the_progress_of_each_stage_is_in_its_own_unit() -> None:
    first, now = Pulse(0.0, 0, 0.0, 0), Pulse(10.0, 500, 8.0, 1)

    def shown(stage: LoadStage) -> tuple[str, int, int | None, str]:
        progress = stage_progress(stage, first, now, 1000)
        return progress.stage, progress.done, progress.total, progress.unit

    assert shown(LoadStage(LOADING)) == ("loading", 500, 1000, "bytes")
    assert shown(LoadStage(WARMING_UP)) == ("warming up", 10, None, "s")
    assert shown(LoadStage(CAPTURING, 4, 35)) == ("capturing graphs", 4, 35, "graphs")
    assert shown(LoadStage(CAPTURING)) == ("capturing graphs", 10, None, "s")
