"""An interpreter that has a SGLang: the folders, a few model files and the installer's record, and no engine."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from pathlib import Path

from changeover.engines.patch.installed import Installed, find_sglang

MODEL = '''"""A model."""

from __future__ import annotations

import torch


class FooModel:
    def forward(self, ids):
        return ids


class FooForCausalLM:
    def __init__(self):
        self.captured = None

    def set_eagle3_layers_to_capture(self, layer_ids=None):
        self.captured = layer_ids

    @torch.no_grad()
    def forward(
        self,
        ids,
    ):
        """Of the rows, the logits."""
        hidden = self.model(ids)
        return self.logits_processor(ids, hidden)

    def other(self):
        return "set_eagle3_layers_to_capture"
'''
OLD = "class OldForCausalLM:\n    def forward(self, ids):\n        return self.logits_processor(ids)\n"
FILES = {"llama.py": MODEL, "qwen2.py": MODEL.replace("Foo", "Bar"), "deepseek_v2.py": OLD, "gpt9.py": OLD}


def make_environment(folder: Path) -> Path:
    """Its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [site] = folder.glob("lib/python3*/site-packages")
    models = site / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    for package in (site / "sglang", site / "sglang" / "srt", models):
        (package / "__init__.py").write_text("")
    (site / "sglang" / "srt" / "server.py").write_text("NAME = 'server'\n")
    record = []
    for name, text in FILES.items():
        (models / name).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"sglang/srt/models/{name},sha256={digest},{len(text)}")
    told = site / "sglang-0.5.23.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    (told / "RECORD").write_text("\n".join(record) + "\n")
    return folder / "bin" / "python"


def make_sglang(folder: Path) -> Installed:
    return find_sglang(str(make_environment(folder)))


def contents(installed: Installed) -> dict[str, bytes]:
    """Every file of the models' folder, but bytecode."""
    return {path.name: path.read_bytes() for path in sorted(installed.models.iterdir()) if path.is_file()}


def as_made() -> dict[str, bytes]:
    return {"__init__.py": b"", **{name: text.encode() for name, text in sorted(FILES.items())}}
