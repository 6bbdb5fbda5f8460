"""A package first on the path that is SGLang with the patch in its model files; the installed one stays as it is.

``FOLDER/sglang`` is made of links to the installed files; real are only the three folders on the way to the model
files, and the patched files. Python takes a package from the first folder on its path that has it, whole.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from changeover.engines.patch.installed import USABLE, Installed, model_files
from changeover.engines.patch.source import SourceState, patched
from changeover.machine.durable import replace_json
from changeover.machine.errors import InvalidInput

MARKER = "changeover-overlay.json"
_NOT_LINKED = ("__pycache__",)


def build_overlay(installed: Installed, folder: Path) -> list[str]:
    """Make ``folder`` anew; the names of the files that are patched in it. It appears whole, or not at all.

    Raises InvalidInput where the folder is somebody else's, or nothing can be patched.
    """
    _expect_ours(folder)
    files = [it for it in model_files(installed) if it.state in USABLE]
    if not files:
        raise InvalidInput(
            expected=f"a model file that the patch knows in {installed.models}",
            seen=f"SGLang {installed.version}, with none",
            todo="`changeover patch status` says of each why not; no SGLang below 0.5.3 was looked at.",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        srt = making / "sglang" / "srt"
        (srt / "models").mkdir(parents=True)
        _link(installed.package, making / "sglang", without=("srt",))
        _link(installed.package / "srt", srt, without=("models",))
        _link(installed.models, srt / "models", without=tuple(it.name for it in files))
        for it in files:
            text = it.path.read_bytes().decode()
            whole = text if it.state is SourceState.PATCHED else patched(text)
            (srt / "models" / it.name).write_bytes(whole.encode())
        names = [it.name for it in files]
        replace_json(
            making / MARKER, {"package": str(installed.package), "version": installed.version, "files": names}
        )
        remove_overlay(folder)
        making.rename(folder)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    return names


def read_overlay(folder: Path) -> list[str] | None:
    """The names of the files that are patched in it; None where there is none."""
    try:
        told = json.loads((folder / MARKER).read_text())
    except FileNotFoundError:
        return None
    return list(told["files"])


def remove_overlay(folder: Path) -> bool:
    """False where there is none; raises InvalidInput where it is not ours. Links are removed, never what they name."""
    _expect_ours(folder)
    if not folder.exists():
        return False
    shutil.rmtree(folder)
    return True


def _expect_ours(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not (folder / MARKER).is_file()):
        raise InvalidInput(
            expected=f"{folder} absent, or an overlay ({MARKER} in it)",
            seen="something else",
            todo="Name another folder; what is there stays.",
        )


def _link(source: Path, target: Path, *, without: tuple[str, ...]) -> None:
    for entry in os.scandir(source):
        if entry.name not in (*without, *_NOT_LINKED):
            (target / entry.name).symlink_to(Path(entry.path).absolute())
