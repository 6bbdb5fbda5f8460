"""How samples lie in a shard: pure functions from arrays to bytes and back.

A shard is a valid safetensors file. safetensors refuses holes between tensors (checked with 0.8.0: "invalid
offset for tensor"), so that the alignment is made of bytes that belong to somebody: the header is filled up
with spaces to HEADER_BYTES, and every sample ends with a ``<id>.pad`` tensor of zeros. So each sample is one
contiguous record that starts and ends on a 4 KiB boundary: one ``preadv`` reads it, O_DIRECT included, and
one hash covers it, padding too.

Tensors of a sample, in this order (T tokens, n boundaries, H hidden size):

- codec ``none``: ``input_ids`` I64 [T], ``aux`` BF16 [T, n, H], ``last`` BF16 [T, H], ``loss_mask`` U8 [T],
  ``pad``
- codec ``bytesplit-zstd1``: ``aux`` and ``last`` each as ``*_high`` U8 [compressed] (sign and exponent, zstd
  level 1) and ``*_low`` U8 [T, ..., H] (mantissa: does not compress, kept raw)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from changeover.machine.errors import InvalidInput, NotSupported
from changeover.states.manifest import Codec, Manifest

ALIGNMENT_BYTES = 4096
HEADER_BYTES = 128 * 1024  # length word included; about 150 samples
_HEADER_ROOM = HEADER_BYTES - 8 - 512  # 512: braces and the format words

U16 = npt.NDArray[np.uint16]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Sample:
    """One sequence with its states; bf16 is carried as uint16 (same bits), so that torch is not needed.

    ``input_ids`` int64 [T]; ``loss_mask`` uint8 [T], 1 where the token was generated (not part of the
    prompt); ``aux`` uint16 [T, n_boundaries, H]; ``last`` uint16 [T, H].
    """

    id: str
    input_ids: I64
    loss_mask: U8
    aux: U16
    last: U16

    @property
    def tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class Entry:
    """One line of the index: where a sample lies and what its bytes must hash to.

    ``offset`` and ``bytes`` are multiples of 4 KiB within the shard file; ``planes`` holds the compressed
    lengths of the high bytes of aux and last (codec bytesplit-zstd1 only).
    """

    id: str
    shard: str
    offset: int
    bytes: int
    tokens: int
    prompt_tokens: int
    supervised_tokens: int
    codec: Codec
    planes: tuple[int, ...]
    xxh3_128: str
    ids_sha256: str
    finite: bool

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "planes": list(self.planes)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Entry:
        return cls(**{**data, "planes": tuple(data["planes"])})


@dataclass(frozen=True)
class Part:
    """One tensor of a record: its name after the id, safetensors dtype, shape, and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def check_sample(sample: Sample, manifest: Manifest) -> None:
    """Raises InvalidInput where the sample does not have the shapes and types of the dataset, or is not
    finite.
    """
    tokens, aux_count, hidden = sample.tokens, len(manifest.boundaries), manifest.hidden
    wanted = {
        "input_ids": (np.int64, (tokens,)),
        "loss_mask": (np.uint8, (tokens,)),
        "aux": (np.uint16, (tokens, aux_count, hidden)),
        "last": (np.uint16, (tokens, hidden)),
    }
    for name, (dtype, shape) in wanted.items():
        array = getattr(sample, name)
        if array.dtype != dtype or array.shape != shape:
            raise InvalidInput(
                expected=f"{name} of sample {sample.id!r} as {np.dtype(dtype)} {list(shape)}",
                seen=f"{array.dtype} {list(array.shape)}",
                todo="Store one row per token, without padding rows, at the manifest's boundaries.",
            )
    if not sample.id or len(sample.id) > 256 or not sample.id.isprintable():
        raise InvalidInput(
            expected="a printable sample id of 1 to 256 characters",
            seen=repr(sample.id[:300]),
            todo="Rename it.",
        )
    if tokens == 0:
        raise InvalidInput(
            expected=f"tokens in sample {sample.id!r}", seen="none", todo="Leave the sample out."
        )
    for name in ("aux", "last"):
        if not is_finite(getattr(sample, name)):
            raise InvalidInput(
                expected=f"finite states in sample {sample.id!r}",
                seen=f"NaN or infinity in {name}",
                todo="Record it in failures.jsonl: such a sample is never stored.",
            )


def is_finite(bits: U16) -> bool:
    """Whether no bf16 value (given by its bits) is NaN or infinite: an exponent of all ones is either."""
    flat = bits.reshape(-1)
    # In pieces, so that a 99 MB sample does not make three temporary arrays of its own size.
    step = 1 << 20
    return not any(bool((flat[i : i + step] & 0x7F80 == 0x7F80).any()) for i in range(0, len(flat), step))


def parts(entry: Entry, manifest: Manifest) -> list[Part]:
    """The tensors of a record, in file order, padding last; their bytes add up to ``entry.bytes``."""
    tokens, aux_count, hidden = entry.tokens, len(manifest.boundaries), manifest.hidden
    aux_values, last_values = tokens * aux_count * hidden, tokens * hidden
    listed = [Part("input_ids", "I64", (tokens,), 8 * tokens)]
    if entry.codec == "none":
        listed += [
            Part("aux", "BF16", (tokens, aux_count, hidden), 2 * aux_values),
            Part("last", "BF16", (tokens, hidden), 2 * last_values),
        ]
    else:
        aux_high, last_high = entry.planes
        listed += [
            Part("aux_high", "U8", (aux_high,), aux_high),
            Part("aux_low", "U8", (tokens, aux_count, hidden), aux_values),
            Part("last_high", "U8", (last_high,), last_high),
            Part("last_low", "U8", (tokens, hidden), last_values),
        ]
    listed.append(Part("loss_mask", "U8", (tokens,), tokens))
    padding = entry.bytes - sum(part.bytes for part in listed)
    return [*listed, Part("pad", "U8", (padding,), padding)] if padding else listed


def encode_record(sample: Sample, codec: Codec) -> tuple[list[memoryview], tuple[int, ...]]:
    """The buffers of a record in file order, padded to ALIGNMENT_BYTES, and the lengths of the compressed
    planes.
    """
    buffers: list[memoryview] = [_view(sample.input_ids)]
    planes: tuple[int, ...] = ()
    if codec == "none":
        buffers += [_view(sample.aux), _view(sample.last)]
    else:
        for array in (sample.aux, sample.last):
            high, low = _split_bytes(array)
            planes += (len(high),)
            buffers += [memoryview(high), low]
    buffers.append(_view(sample.loss_mask))
    padding = -sum(buffer.nbytes for buffer in buffers) % ALIGNMENT_BYTES
    return [*buffers, memoryview(bytes(padding))], planes


def decode_record(record: memoryview, entry: Entry, manifest: Manifest) -> Sample:
    """The sample in ``record``; its arrays are views of ``record`` where the codec allows."""
    pieces: dict[str, memoryview] = {}
    position = 0
    for part in parts(entry, manifest):
        pieces[part.name] = record[position : position + part.bytes]
        position += part.bytes
    aux_shape = (entry.tokens, len(manifest.boundaries), manifest.hidden)
    last_shape = (entry.tokens, manifest.hidden)
    if entry.codec == "none":
        aux = np.frombuffer(pieces["aux"], np.uint16)
        last = np.frombuffer(pieces["last"], np.uint16)
    else:
        aux = _join_bytes(pieces["aux_high"], pieces["aux_low"])
        last = _join_bytes(pieces["last_high"], pieces["last_low"])
    return Sample(
        id=entry.id,
        input_ids=np.frombuffer(pieces["input_ids"], np.int64),
        loss_mask=np.frombuffer(pieces["loss_mask"], np.uint8),
        aux=aux.reshape(aux_shape),
        last=last.reshape(last_shape),
    )


def header_cost(entry: Entry, manifest: Manifest) -> int:
    """Bytes that a sample takes in a shard's header (never less than what build_header uses)."""
    tensors = json.dumps(_tensor_facts(entry, manifest, entry.offset), separators=(",", ":"))
    index = json.dumps(json.dumps(entry.to_json(), separators=(",", ":")))
    return len(tensors) + len(index) + 2


def header_is_full(used: int, cost: int) -> bool:
    return used + cost > _HEADER_ROOM


def build_header(entries: Sequence[Entry], manifest: Manifest) -> bytes:
    """The first HEADER_BYTES of a shard: a function of its entries, so that ``verify`` can tell a damaged
    header.

    The entries stand in the metadata too: an index that was lost between the rename of the shard and the
    append can be made again from the shards.
    """
    tensors: dict[str, Any] = {
        "__metadata__": {
            "format": "changeover-states-1",
            "index": json.dumps([entry.to_json() for entry in entries], separators=(",", ":")),
        }
    }
    for entry in entries:
        tensors |= _tensor_facts(entry, manifest, entry.offset)
    text = json.dumps(tensors, separators=(",", ":")).encode()
    room = HEADER_BYTES - 8
    if len(text) > room:
        raise AssertionError(f"header of {len(text)} bytes in {room}: header_is_full was not asked")
    return room.to_bytes(8, "little") + text.ljust(room)


def entries_in_header(header: bytes) -> list[Entry]:
    """The entries that build_header put into a shard. Raises ValueError where the header is damaged."""
    if len(header) < 8:
        raise ValueError(f"{len(header)} bytes are no header")
    length = int.from_bytes(header[:8], "little")
    if length != HEADER_BYTES - 8 or len(header) < HEADER_BYTES:
        raise ValueError(f"header length {length}, expected {HEADER_BYTES - 8}")
    metadata = json.loads(header[8:HEADER_BYTES])["__metadata__"]
    return [Entry.from_json(value) for value in json.loads(metadata["index"])]


def hash_ids(input_ids: I64) -> str:
    """sha256 of the token ids as little-endian int64."""
    return hashlib.sha256(np.ascontiguousarray(input_ids, dtype="<i8").tobytes()).hexdigest()


def _tensor_facts(entry: Entry, manifest: Manifest, offset: int) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    position = offset - HEADER_BYTES
    for part in parts(entry, manifest):
        facts[f"{entry.id}.{part.name}"] = {
            "dtype": part.dtype,
            "shape": list(part.shape),
            "data_offsets": [position, position + part.bytes],
        }
        position += part.bytes
    return facts


def _view(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _split_bytes(array: U16) -> tuple[bytes, memoryview]:
    pairs = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, 2)
    high = np.ascontiguousarray(pairs[:, 1])
    return _zstandard().ZstdCompressor(level=1).compress(high), _view(pairs[:, 0])


def _join_bytes(high: memoryview, low: memoryview) -> U16:
    pairs = np.empty((low.nbytes, 2), np.uint8)
    pairs[:, 0] = np.frombuffer(low, np.uint8)
    plane = _zstandard().ZstdDecompressor().decompress(bytes(high), max_output_size=low.nbytes)
    pairs[:, 1] = np.frombuffer(plane, np.uint8)
    return pairs.reshape(-1).view(np.uint16)


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise NotSupported(
            expected="the package zstandard for codec bytesplit-zstd1",
            seen="not installed",
            todo="pip install 'changeover[compress]', or use codec none.",
        ) from error
    return zstandard
