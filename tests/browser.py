"""A page in headless Chromium: its DOM after the scripts have run, and its console."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

TIMEOUT_S = 120
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--v=0",
    "--virtual-time-budget=3000",
)


def open_page(chromium: str, page: Path, *more: str) -> tuple[str, list[str]]:
    """The DOM after the scripts have run, and what the page wrote to the console."""
    profile = page.parent / "profile"
    command = [chromium, *FLAGS, f"--user-data-dir={profile}", *more, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)
