"""Where a server that comes up is, from its own log: reading weights, warming up, capturing graphs.

The lines were read in SGLang 0.5.23 (``model_runner.py``, ``cuda_graph_setup.py``, ``decode_cuda_graph_runner.py``) and
vLLM 0.32 (``default_loader.py``, ``weight_utils.py``, ``cudagraph_utils.py``). It is shown, and decides nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

LOADING, WARMING_UP, CAPTURING = "loading", "warming up", "capturing graphs"
_MOST_BYTES = 262_144

_MARKS = re.compile(
    r"(?P<capturing>capture [\w ]*cuda graph begin|capturing (?:batches|cuda graphs)[^\r\n]*)"
    r"|(?P<warming>capture [\w ]*cuda graph end|graph capturing finished|load weight end|loading weights took|"
    r"memory pool end|init engine)"
    r"|(?P<loading>load weight begin|starting to load model|loading (?:safetensors checkpoint |pt checkpoint )?shards)",
    re.IGNORECASE,
)
_BAR = re.compile(r"(\d+)/(\d+) \[")  # tqdm's


@dataclass(frozen=True)
class LoadStage:
    """One of the three, and how many graphs are captured of how many, where the log says so."""

    name: str = LOADING
    done: int | None = None
    total: int | None = None


class LogStages:
    """Reads a log as it grows; ``look`` gives the stage that its last telling line speaks of."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offset = 0
        self._stage = LoadStage()

    def look(self) -> LoadStage:
        try:
            with self._log.open("rb") as file:
                end = file.seek(0, 2)
                self._offset = file.seek(max(self._offset, end - _MOST_BYTES))
                raw = file.read()
        except FileNotFoundError:
            return self._stage
        whole = max(raw.rfind(b"\n"), raw.rfind(b"\r")) + 1  # the rest of a line comes with the next look
        self._offset += whole
        self._stage = _read(raw[:whole].decode(errors="replace"), self._stage)
        return self._stage


def _read(text: str, stage: LoadStage) -> LoadStage:
    for mark in _MARKS.finditer(text):
        if mark["capturing"]:
            bar = _BAR.search(mark["capturing"])
            counted = (int(bar[1]), int(bar[2])) if bar else (None, None)
            stage = LoadStage(CAPTURING, *counted)
        else:
            stage = LoadStage(WARMING_UP if mark["warming"] else LOADING)
    return stage
