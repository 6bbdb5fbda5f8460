"""JSON lines that know whether they are whole: each carries the CRC-32 of its own content.

The rule is the journal's (docs/design.md): ``crc`` is zlib.crc32, in hex, of the canonical JSON (sorted keys,
no spaces) of the line without ``crc``.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Line:
    """One line of a file: its number (from 1), its first byte, and its content or what is wrong with it."""

    number: int
    offset: int
    value: dict[str, Any] | None
    damage: str | None
    torn: bool


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def encode_line(value: Mapping[str, Any]) -> bytes:
    """``value`` with its crc, as one line."""
    crc = f"{zlib.crc32(_canonical(value)):08x}"
    return _canonical({**value, "crc": crc}) + b"\n"


def decode_line(raw: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """(content without crc, None) of a whole line; (None, what is wrong) of a damaged one."""
    try:
        value = json.loads(raw)
    except ValueError as error:
        return None, f"not JSON ({error})"
    if not isinstance(value, dict) or not isinstance(value.get("crc"), str):
        return None, "no crc in the line"
    crc = value.pop("crc")
    actual = f"{zlib.crc32(_canonical(value)):08x}"
    if crc != actual:
        return None, f"crc says {crc}, content gives {actual}"
    return value, None


def read_lines(path: Path) -> Iterator[Line]:
    """Every line of ``path`` (none where the file is absent); ``torn`` marks a last line without its
    newline.
    """
    if not path.exists():
        return
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            value, damage = decode_line(raw)
            yield Line(number, offset, value, damage, torn=not raw.endswith(b"\n"))
            offset += len(raw)


def cut_torn_tail(path: Path) -> int:
    """Remove a last line that has no newline (a crash while appending); returns the bytes removed."""
    last = next(iter(deque(read_lines(path), maxlen=1)), None)
    if last is None or not last.torn:
        return 0
    size = path.stat().st_size
    with path.open("rb+") as file:
        file.truncate(last.offset)
        os.fsync(file.fileno())
    return size - last.offset
