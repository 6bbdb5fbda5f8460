"""``patch_worker.py FOLDER apply|restore N``: changes the model files, and is killed at its N-th step on the disk."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from changeover.engines.patch.in_place import apply_in_place, restore_in_place
from changeover.engines.patch.installed import Installed
from changeover.machine.clock import SystemClock

STEPS = ("open", "os.rename", "os.remove", "os.chmod", "os.chown", "os.utime", "shutil.copystat")


def installed_in(folder: Path) -> Installed:
    """The tree of ``sglang_tree`` without asking its interpreter."""
    told = json.loads((folder / "installed.json").read_text())
    return Installed(told["python"], told["version"], Path(told["package"]), (), {})


def main(folder: Path, action: str, kill_at: int) -> None:
    installed = installed_in(folder)
    seen = 0

    def step(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in STEPS and str(folder) in str(args[0]):
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(step)
    change = apply_in_place if action == "apply" else restore_in_place
    change(installed, folder / "journal.jsonl", SystemClock(), look=lambda _: [])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
