"""Where we keep what belongs to no run."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder(name: str) -> Path:
    """``$XDG_STATE_HOME/changeover/NAME`` (default ``~/.local/state``), made with mode 0700 where it is missing."""
    state = os.environ.get("XDG_STATE_HOME")
    folder = (Path(state) if state else Path.home() / ".local" / "state") / "changeover" / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
