"""Checkpoints of a training run: whole or absent, and enough in them that a resumed run equals an
uninterrupted one.

``checkpoints/step-00000042/``: ``model.safetensors`` (fp32 weights), ``optimizer.pt`` (optimizer and random
state, read back with ``weights_only``), ``state.json`` (position and curves, with the SHA-256 of the other
two). Written under a temporary name, fsynced, renamed; the newest whole one wins, and one older is kept in
case the newest is damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from changeover.machine.errors import InvalidInput

KEEP = 2
_PREFIX = "step-"


@dataclass(frozen=True)
class Checkpoint:
    """``state`` is the JSON part; ``optimizer`` what the caller gave as such."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    state: dict[str, Any]


def save_checkpoint(
    root: Path,
    step: int,
    *,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Any],
    state: Mapping[str, Any],
) -> Path:
    """Write ``root/step-<step>`` durably, then drop all but the newest two and whatever a crash left half
    written.
    """
    from safetensors.torch import save_file

    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".tmp-*"):
        shutil.rmtree(leftover)
    final = root / f"{_PREFIX}{step:08d}"
    draft = root / f".tmp-{step:08d}-{os.getpid()}"
    draft.mkdir()
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in model.items()},
        draft / "model.safetensors",
    )
    torch.save(dict(optimizer), draft / "optimizer.pt")
    hashes = {name: _sha256(draft / name) for name in ("model.safetensors", "optimizer.pt")}
    (draft / "state.json").write_text(json.dumps({"step": step, "sha256": hashes, **state}, allow_nan=False))
    for file in draft.iterdir():
        _fsync(file)
    _fsync(draft)
    if final.exists():
        shutil.rmtree(final)
    draft.rename(final)
    _fsync(root)
    for old in _folders(root)[:-KEEP]:
        shutil.rmtree(old)
    return final


def newest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest whole checkpoint of ``root``, None when there is none.

    Raises InvalidInput when there are some and all are damaged: starting again from nothing is the user's
    decision.
    """
    from safetensors.torch import load_file

    damaged = []
    for folder in reversed(_folders(root)):
        seen = _damage(folder)
        if seen is not None:
            damaged.append(f"{folder.name}: {seen}")
            continue
        state = json.loads((folder / "state.json").read_text())
        return Checkpoint(
            step=int(state["step"]),
            model=load_file(folder / "model.safetensors"),
            optimizer=torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu"),
            state=state,
        )
    if damaged:
        raise InvalidInput(
            expected=f"a whole checkpoint in {root}",
            seen="; ".join(damaged),
            todo="Restore one, or train with resume off (which starts from the beginning).",
        )
    return None


def _folders(root: Path) -> list[Path]:
    return sorted(root.glob(f"{_PREFIX}*")) if root.is_dir() else []


def _damage(folder: Path) -> str | None:
    try:
        hashes = json.loads((folder / "state.json").read_text())["sha256"]
        wrong = [name for name, wanted in hashes.items() if _sha256(folder / name) != wanted]
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return f"{', '.join(wrong)} changed since written" if wrong else None


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
