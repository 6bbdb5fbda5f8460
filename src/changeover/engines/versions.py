"""Which version of an engine is installed, and what each can do: one table, read from their sources and tried.

The version is asked of the engine's own interpreter, never assumed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from changeover.engines.protocol import Profile
from changeover.machine.bounded import Answer, run_bounded

_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Support:
    """``captures_since``: the first version whose capture we can drive, and why not earlier; ``run_with``: those on
    which the whole door was run.
    """

    package: str
    captures_since: tuple[int, ...]
    why: str
    run_with: tuple[str, ...]


SUPPORT = {
    "sglang": Support(
        "sglang",
        (0, 5, 17),
        "its chat answers do not say their token ids before it",
        ("0.5.17", "0.5.23"),
    ),
    "vllm": Support(
        "vllm",
        (0, 32),
        "our connector builds on its hidden-states connector, which was run in 0.32 and only read before it",
        ("0.32.0",),
    ),
}


PATCH_READ = tuple(
    (0, 5, patch) for patch in (3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23)
)
"""Versions of SGLang on whose model files the capture patch was tried: it goes in, Python compiles it, it comes out."""


@cache
def installed_version(kind: str, python: str) -> str | None:
    """What the engine's interpreter says of its package; None where it has none, or cannot be asked."""
    if kind not in SUPPORT:
        return None
    code = f"from importlib.metadata import version; print(version({SUPPORT[kind].package!r}))"
    result = run_bounded([python, "-c", code], timeout_s=_TIMEOUT_S, env={"PATH": "/usr/bin:/bin"})
    return result.output.strip() or None if result.answer is Answer.GIVEN else None


def version_refusal(kind: str, version: str | None, profile: Profile) -> str | None:
    """Why this version cannot do what the profile needs, or None; an unknown version is not refused."""
    if kind not in SUPPORT or version is None or profile != "capture":
        return None
    support = SUPPORT[kind]
    if parsed(version) >= support.captures_since:
        return None
    wanted = ".".join(map(str, support.captures_since))
    return f"profile capture: expected {kind} {wanted} or newer; saw {version} ({support.why})"


def parsed(version: str) -> tuple[int, ...]:
    """``0.5.23.post1+cpu`` -> (0, 5, 23)."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, found[1].split("."))) if found else ()
