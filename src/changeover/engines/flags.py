"""Reading the free flags of a server: what they say twice, and what a profile cannot work with.

Engines take ``--name value`` and ``--name=value``; vLLM takes ``_`` for ``-`` in names, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def conflicts(flags: Sequence[str], profile: str, reasons: Mapping[str, str]) -> list[str]:
    """A refusal for each flag given that ``reasons`` names, in the order of ``reasons``."""
    given = {_name(flag) for flag in flags if flag.startswith("--")}
    return [
        f"profile {profile}: {reason}; remove {flag} from flags"
        for flag, reason in reasons.items()
        if flag in given
    ]


def value_after(flags: Sequence[str], name: str) -> str | None:
    """The value of the first flag of this name; None where it is not given."""
    for at, flag in enumerate(flags):
        if not flag.startswith("--") or _name(flag) != name:
            continue
        if "=" in flag:
            return flag.partition("=")[2]
        return flags[at + 1] if at + 1 < len(flags) else None
    return None


def _name(flag: str) -> str:
    return flag.partition("=")[0].replace("_", "-")
