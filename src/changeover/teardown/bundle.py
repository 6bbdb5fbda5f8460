"""One file that carries the teardown to a box with nothing but Python: a zipapp of machine/, teardown/ and pynvml.

python -m changeover.teardown.bundle OUT.pyz
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import changeover

MINIMUM = (3, 10)
_ROOMS = ("machine", "teardown")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same bytes from the same sources
_MAIN = b"""\
import enum, sys
if not hasattr(enum, "StrEnum"):  # Python 3.10
    class StrEnum(str, enum.Enum):
        __str__ = str.__str__
    enum.StrEnum = StrEnum
from changeover.teardown.agent import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Bundle:
    data: bytes
    sha256: str


def make_bundle() -> Bundle:
    """Deterministic: the same sources make the same bytes, so that a box that has them is not sent them again."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(_files()):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    return Bundle(data, hashlib.sha256(data).hexdigest())


def _files() -> Iterator[tuple[str, bytes]]:
    home = Path(changeover.__file__).parent
    yield "__main__.py", _MAIN
    yield "changeover/__init__.py", (home / "__init__.py").read_bytes()
    for room in _ROOMS:
        for path in (home / room).glob("*.py"):
            yield f"changeover/{room}/{path.name}", path.read_bytes()
    found = importlib.util.find_spec("pynvml")
    if found is not None and found.origin is not None and found.submodule_search_locations is None:
        yield "pynvml.py", Path(found.origin).read_bytes()


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m changeover.teardown.bundle OUT.pyz", file=sys.stderr)
        return 2
    bundle = make_bundle()
    Path(arguments[0]).write_bytes(b"#!/usr/bin/env python3\n" + bundle.data)
    print(f"{arguments[0]}: {len(bundle.data) / 1024:.0f} KiB, sha256 {bundle.sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
