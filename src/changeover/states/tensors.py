"""Single tensors out of a safetensors file that somebody else wrote, as float32 or int64; nothing in it is believed
before it is checked. numpy has no bfloat16, and reading a file needs no torch.

Format: https://github.com/huggingface/safetensors (8 bytes of header length, JSON, data).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_MAX_HEADER_BYTES = 100 << 20  # the library's own limit
_AS_STORED: Mapping[str, type[np.generic]] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I64": np.int64,
}


class TensorFileInvalid(Exception):  # noqa: N818 - becomes the reason of a failed sample
    """Not a safetensors file, or not with such a tensor; says what is wrong."""


class TensorFile:
    """A file whose header has been read; raises TensorFileInvalid for one that is no such file."""

    def __init__(self, path: Path, max_header_bytes: int = _MAX_HEADER_BYTES) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > max_header_bytes or size + 8 > path.stat().st_size:
                    raise TensorFileInvalid(f"{path.name} is truncated or not safetensors")
                header = json.loads(file.read(size))
            self._facts = {name: facts for name, facts in header.items() if isinstance(facts, dict)}
        except OSError as error:
            raise TensorFileInvalid(f"{path.name}: {error.strerror}") from error
        except (ValueError, AttributeError) as error:
            raise TensorFileInvalid(f"{path.name}: its header is not JSON") from error
        self._data_at = 8 + size

    def stored(self, name: str) -> tuple[str, npt.NDArray[Any]]:
        """The format's word for the type, and the numbers as they stand there (bfloat16 as its bits)."""
        try:
            facts = self._facts[name]
            shape = tuple(int(size) for size in facts["shape"])
            start, end = (int(offset) for offset in facts["data_offsets"])
            dtype = str(facts["dtype"])
            kind = np.dtype(_AS_STORED[dtype])
        except (KeyError, TypeError, ValueError) as error:
            raise TensorFileInvalid(f"{self._path.name}: no {name} of a known kind") from error
        count = int(np.prod(shape, dtype=np.int64))
        inside = min((start, *shape)) >= 0 and self._data_at + end <= self._path.stat().st_size
        if not inside or end - start != count * kind.itemsize:
            raise TensorFileInvalid(
                f"{self._path.name}: {name} of shape {list(shape)} does not lie in the file"
            )
        return dtype, np.fromfile(self._path, kind, count, offset=self._data_at + start).reshape(shape)

    def read(self, name: str) -> npt.NDArray[Any]:
        """Floats of 16 or 32 bits as float32, int64 as it is."""
        dtype, values = self.stored(name)
        if dtype == "I64":
            return values
        if dtype == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)


def to_bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded to nearest even, as torch does; the values must be finite (a NaN could round to zero)."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
