"""What a finished job left on the disk, recorded so that "done" can be checked again and not just believed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# sha256 takes a second per 1.5 GB here; what is larger is recorded by size, and has checksums of its own (states)
HASHED_BYTES = 256 * 1024 * 1024


def record_outputs(folder: Path, names: Iterable[str]) -> list[dict[str, Any]]:
    """One entry a file below ``folder``: relative path, bytes, sha256 (None above HASHED_BYTES).

    A name may be a file or a folder. Raises FileNotFoundError for a name that is not there.
    """
    entries = []
    for name in names:
        path = folder / name
        files = sorted(found for found in path.rglob("*") if found.is_file()) if path.is_dir() else [path]
        entries += [_describe(folder, file) for file in files]
    return entries


def changed_outputs(folder: Path, recorded: Iterable[dict[str, Any]]) -> list[str]:
    """What is no longer as recorded, in words; empty where all of it stands."""
    problems = []
    for entry in recorded:
        path = folder / entry["path"]
        if not path.is_file():
            problems.append(f"{entry['path']}: missing")
            continue
        now = _describe(folder, path)
        if now != entry:
            problems.append(f"{entry['path']}: expected {entry['bytes']} bytes with sha256 {entry['sha256']}")
    return problems


def _describe(folder: Path, path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    digest = None
    if size <= HASHED_BYTES:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"path": str(path.relative_to(folder)), "bytes": size, "sha256": digest}
