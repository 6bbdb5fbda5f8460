"""Single tensors out of a safetensors file that somebody else wrote, as float32 or int64; nothing in it is believed
before it is checked. numpy has no bfloat16, and reading a file needs no torch.

Format: https://github.com/huggingface/safetensors (8 bytes of header length, JSON, data).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_MAX_HEADER_BYTES = 100 << 20  # the library's own limit
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8}


class TensorFileInvalid(Exception):  # noqa: N818 - becomes the reason of a failed sample
    """Not a safetensors file, or not with such a tensor; says what is wrong."""


def read_tensor_header(path: Path) -> dict[str, dict[str, Any]]:
    """Name -> dtype, shape, data_offsets, and in ``_data`` where the data begins. Raises TensorFileInvalid."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MAX_HEADER_BYTES or size + 8 > path.stat().st_size:
                raise TensorFileInvalid(f"{path.name} is truncated or not safetensors")
            header = json.loads(file.read(size))
        return {
            name: {**facts, "_data": 8 + size}
            for name, facts in header.items()
            if name != "__metadata__" and isinstance(facts, dict)
        }
    except OSError as error:
        raise TensorFileInvalid(f"{path.name}: {error.strerror}") from error
    except (ValueError, AttributeError) as error:
        raise TensorFileInvalid(f"{path.name}: its header is not JSON") from error


def read_tensor(path: Path, header: dict[str, dict[str, Any]], name: str) -> npt.NDArray[Any]:
    """One tensor: floats of 16 or 32 bits as float32, int64 as it is. Raises TensorFileInvalid."""
    try:
        facts = header[name]
        shape = tuple(int(size) for size in facts["shape"])
        start, end = (int(offset) for offset in facts["data_offsets"])
        item_bytes = _ITEM_BYTES[facts["dtype"]]
    except (KeyError, TypeError, ValueError) as error:
        raise TensorFileInvalid(f"{path.name}: no {name} of a known kind") from error
    count = int(np.prod(shape, dtype=np.int64))
    at = facts["_data"] + start
    if (
        min((start, *shape)) < 0
        or end - start != count * item_bytes
        or path.stat().st_size < at + count * item_bytes
    ):
        raise TensorFileInvalid(f"{path.name}: {name} of shape {list(shape)} does not lie in the file")
    if facts["dtype"] == "I64":
        return np.fromfile(path, np.int64, count, offset=at).reshape(shape)
    if facts["dtype"] == "BF16":
        bits = np.fromfile(path, np.uint16, count, offset=at)
        return (bits.astype(np.uint32) << 16).view(np.float32).reshape(shape)
    kind = np.float16 if facts["dtype"] == "F16" else np.float32
    return np.fromfile(path, kind, count, offset=at).astype(np.float32).reshape(shape)


def to_bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded to nearest even, as torch does; the values must be finite (a NaN could round to zero)."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
