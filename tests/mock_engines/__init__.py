"""Mocks of SGLang and vLLM: processes that take their command lines and give recorded answers, without a model.

``record.py`` writes down what the real ones answer; ``server.py`` gives it back, and plays what a :class:`Scenario`
says.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path

RECORDED = Path(__file__).parent / "recorded"
MODULES = {"sglang": "sglang/launch_server.py", "vllm": "vllm/entrypoints/cli/main.py"}


@dataclass(frozen=True)
class Scenario:
    """How a mock behaves, by the clock since its start; None: never.

    ``request_s``: how long a request is answered (None: for ever). Each answer counts ``drafts`` and ``accepted`` on
    the data-parallel rank that gives it, on top of the lifetime counts that the recording has.
    """

    load_s: float = 0.2
    silent: bool = False
    stalls_at_s: float | None = None
    dies_at_s: float | None = None
    last_words: tuple[str, ...] = ()
    request_s: float | None = 0.0
    ignores_sigterm: bool = False
    workers: int = 0
    drafts: int = 4
    accepted: int = 3

    def environment(self) -> dict[str, str]:
        return {"MOCK_ENGINE": json.dumps(asdict(self))}


def make_environment(kind: str, folder: Path) -> Path:
    """A Python environment in which ``kind`` is installed, as far as anybody can see from outside; its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin/python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    module = site / MODULES[kind]
    module.parent.mkdir(parents=True)
    root = Path(__file__).parents[2]
    module.write_text(
        f"import sys\nsys.path.insert(0, {str(root)!r})\n"
        f"from tests.mock_engines.server import main\nmain({kind!r})\n"
    )
    version = json.loads((RECORDED / f"{kind}.json").read_text())["version"]
    info = site / f"{kind}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {kind}\nVersion: {version}\n")
    return python
