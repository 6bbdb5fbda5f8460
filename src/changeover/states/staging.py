"""The folder into which the capture server writes; each file leaves it as soon as it is stored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def capture_name(sample_id: str) -> str:
    """The capture file of a sample: the same in every run, so that what a crash left is found again."""
    return f"states-{hashlib.sha256(sample_id.encode()).hexdigest()[:32]}.safetensors"


class Staging:
    """The files of one collection in ``folder``; those of other clients of the server are not touched."""

    def __init__(self, folder: Path, sample_ids: Iterable[str]) -> None:
        self.folder = folder
        self._names = {capture_name(sample_id) for sample_id in sample_ids}

    def files(self) -> list[Path]:
        """Whole files, and the temporary ones of a server that was stopped (``.<name>.<pid>.tmp``)."""
        return [path for path in self.folder.iterdir() if self._is_ours(path.name) or self._announces(path)]

    def _announces(self, path: Path) -> bool:
        """What tells SGLang's hook to write one of ours (``want-<hash of ids>``, with the name in it)."""
        try:
            return path.name.startswith("want-") and path.read_text() in self._names
        except (OSError, UnicodeDecodeError):
            return False

    def sweep(self) -> None:
        for path in self.files():
            path.unlink(missing_ok=True)

    @contextmanager
    def swept(self) -> Iterator[None]:
        """What a crash left goes first; what a stop leaves goes last."""
        self.sweep()
        try:
            yield
        finally:
            self.sweep()

    def _is_ours(self, name: str) -> bool:
        return name in self._names or (name.endswith(".tmp") and name[1:].rsplit(".", 2)[0] in self._names)
