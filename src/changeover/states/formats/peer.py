"""What the formats have in common: a sample as arrays, a file as data, a name that tells its place."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from changeover.states.layout import I64, U8, U16, Sample

PROVENANCE = "changeover.json"
"""Beside what we write: which sample is in which file, the boundaries, the norm. Peers do not look at it."""

Norm = Literal["post", "pre"]


class PeerFileInvalid(Exception):  # noqa: N818 - becomes the reason of a failed sample
    """A file that holds no such sample; says what is wrong."""


@dataclass(frozen=True)
class PeerSample:
    """``aux`` bf16 bits [T, n, H], ``last`` bf16 bits [T, H]; the format says on which side of the final norm."""

    name: str
    input_ids: I64
    loss_mask: U8
    aux: U16
    last: U16


@dataclass(frozen=True)
class TokenRow:
    """The tokens of a sample, without its states."""

    input_ids: I64
    loss_mask: U8


class PeerFormat(Protocol):
    """One trainer's way to keep states. ``last_norm`` is None where its producers differ and the files do not say."""

    name: str
    last_norm: Norm | None

    def path(self, index: int, sample_id: str) -> Path:
        """Where the sample of this number goes, relative to the folder."""
        ...

    def write(self, path: Path, sample: Sample) -> None:
        """The whole file; the caller renames it into its place."""
        ...

    def files(self, folder: Path) -> list[Path]:
        """Every sample's file, in the order of their numbers."""
        ...

    def read(self, path: Path, boundaries: int, hidden: int) -> PeerSample:
        """Raises PeerFileInvalid."""
        ...

    def finish(self, folder: Path, rows: Sequence[TokenRow]) -> None:
        """What stands beside the samples, when all of them are written; ``rows`` in the order of their numbers."""
        ...


class NothingBeside:
    """For formats whose samples stand alone."""

    def finish(self, folder: Path, rows: Sequence[TokenRow]) -> None:
        pass


def numbers_in(path: Path) -> tuple[int, ...]:
    """For sorting ``data_9`` before ``data_10``, folder by folder."""
    digits = "".join(character if character.isdigit() else " " for character in str(path))
    return tuple(int(part) for part in digits.split())


def tensor_of(bits: U16) -> Any:
    """A torch bfloat16 tensor of these bits, sharing them where they may be written."""
    import torch

    owned = np.ascontiguousarray(bits) if bits.flags.writeable else np.array(bits, order="C")
    return torch.from_numpy(owned.view(np.int16)).view(torch.bfloat16)


def bits_of(tensor: Any, shape: Sequence[int], name: str) -> U16:
    """The bits of a floating-point tensor as bf16, in this shape; -1 takes what there is."""
    import torch

    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        raise PeerFileInvalid(f"{name}: expected a floating-point tensor; saw {type(tensor).__name__}")
    try:
        shaped = tensor.detach().to("cpu", torch.bfloat16).reshape(tuple(shape)).contiguous()
    except RuntimeError as error:
        raise PeerFileInvalid(f"{name}: expected {list(shape)}; saw {list(tensor.shape)}") from error
    bits: U16 = shaped.view(torch.int16).numpy().view(np.uint16)
    return bits


def integers_of(tensor: Any, name: str) -> I64:
    """A flat int64 array of an integer or boolean tensor of one sample."""
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point():
        raise PeerFileInvalid(f"{name}: expected a tensor of whole numbers; saw {type(tensor).__name__}")
    values: npt.NDArray[np.int64] = tensor.detach().cpu().reshape(-1).to(torch.int64).numpy()
    return values


def load_torch(path: Path) -> Mapping[str, Any]:
    """A dictionary that ``torch.save`` wrote, gzip or not; nothing in it is run (``weights_only``)."""
    import torch

    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else None
        source = path if raw is None else io.BytesIO(raw)
        loaded = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged pickle makes of itself, it is one bad file
        words = " ".join(str(error).split())[:200]
        raise PeerFileInvalid(f"{type(error).__name__}: {words}") from error
    if not isinstance(loaded, dict):
        raise PeerFileInvalid(f"expected a dictionary of tensors; saw {type(loaded).__name__}")
    return loaded


def take(loaded: Mapping[str, Any], key: str) -> Any:
    if key not in loaded:
        raise PeerFileInvalid(f"no {key}; it has {', '.join(sorted(map(str, loaded)))}")
    return loaded[key]


def save_torch(path: Path, tensors: Mapping[str, Any], *, level: int = 0) -> None:
    """``torch.save``, through gzip at ``level`` where that is not 0."""
    import torch

    if not level:
        torch.save(dict(tensors), path)
        return
    plain = io.BytesIO()
    torch.save(dict(tensors), plain)
    with gzip.open(path, "wb", compresslevel=level) as file:
        file.write(plain.getbuffer())


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """``write(temporary)``, fsync, rename: a file that stands there is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    write(temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def read_provenance(folder: Path) -> dict[str, Any]:
    """What ``changeover.json`` says; empty where the folder is somebody else's."""
    try:
        value = json.loads((folder / PROVENANCE).read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
