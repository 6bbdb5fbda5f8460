"""What a states folder says of itself: where the states come from and how they are laid out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

from changeover.machine.errors import InvalidInput

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"

Codec = Literal["none", "bytesplit-zstd1"]
CODECS: tuple[Codec, ...] = ("none", "bytesplit-zstd1")


@dataclass(frozen=True)
class Manifest:
    """Provenance and layout of one dataset.

    ``boundaries`` counts decoder layers before the captured residual stream (changeover.states.conventions);
    ``last_norm`` says whether ``last`` was taken after ("post") or before ("pre") the final norm. ``gate``
    and ``probe`` are empty until the end of the collection; ``sealed`` is True only behind a passed gate.
    """

    hidden: int
    layers: int
    vocab: int
    boundaries: tuple[int, ...]
    last_norm: Literal["post", "pre"] = "post"
    codec: Codec = "none"
    dtype: Literal["bfloat16"] = "bfloat16"
    model_name: str | None = None
    model_path: str | None = None
    model_sha256: str | None = None
    engine_kind: str | None = None
    engine_version: str | None = None
    profile: str | None = None
    tokenizer_sha256: str | None = None
    chat_template_sha256: str | None = None
    held_out_fraction: float = 0.0
    created: str | None = None
    sealed: bool = False
    gate: Mapping[str, Any] = field(default_factory=dict)
    probe: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise InvalidInput(
                expected=f"a codec out of {', '.join(CODECS)}",
                seen=repr(self.codec),
                todo="Write one of these.",
            )
        if not self.boundaries or any(not 0 <= b <= self.layers for b in self.boundaries):
            raise InvalidInput(
                expected=f"boundaries from 0 to {self.layers} (the model's layers)",
                seen=str(list(self.boundaries)),
                todo="See changeover.states.conventions.default_boundaries.",
            )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the states of one token, uncompressed (bf16)."""
        return 2 * self.hidden * (len(self.boundaries) + 1)

    def differences(self, other: Manifest) -> list[str]:
        """What makes samples of ``other`` unfit to stand in this dataset; empty when they belong together."""
        loose = {"created", "sealed", "gate", "probe", "model_path"}
        return [
            f"{f.name}: {getattr(self, f.name)!r} here, {getattr(other, f.name)!r} asked"
            for f in fields(self)
            if f.name not in loose and getattr(self, f.name) != getattr(other, f.name)
        ]

    def to_json(self) -> dict[str, Any]:
        flat = asdict(self)
        model = {key: flat.pop(f"model_{key}") for key in ("name", "path", "sha256")}
        engine = {key: flat.pop(f"engine_{key}") for key in ("kind", "version")}
        return {
            "schema_version": SCHEMA_VERSION,
            **flat,
            "boundaries": list(self.boundaries),
            "model": model,
            "engine": engine,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Raises InvalidInput for another schema version or a missing field."""
        if data.get("schema_version") != SCHEMA_VERSION:
            raise InvalidInput(
                expected=f"a states manifest of schema version {SCHEMA_VERSION}",
                seen=f"schema_version {data.get('schema_version')!r}",
                todo="Read it with the version of Changeover that wrote it.",
            )
        flat = {key: value for key, value in data.items() if key not in ("schema_version", "model", "engine")}
        flat |= {f"model_{key}": value for key, value in data.get("model", {}).items()}
        flat |= {f"engine_{key}": value for key, value in data.get("engine", {}).items()}
        known = {f.name for f in fields(cls)}
        try:
            flat["boundaries"] = tuple(int(b) for b in flat["boundaries"])
            return cls(**{key: value for key, value in flat.items() if key in known})
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput(
                expected="a whole states manifest",
                seen=f"{type(error).__name__}: {error}",
                todo="The folder's manifest.json is damaged or not one of Changeover's.",
            ) from error

    def with_end(self, *, probe: Mapping[str, Any], gate: Mapping[str, Any], sealed: bool) -> Manifest:
        return replace(self, probe=dict(probe), gate=dict(gate), sealed=sealed)


def read_manifest(root: Path) -> Manifest:
    """Raises InvalidInput where ``root`` is not a states folder."""
    path = root / MANIFEST_NAME
    try:
        data = cast(object, json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise InvalidInput(
            expected=f"a states folder with {MANIFEST_NAME}",
            seen=f"no such file in {root}",
            todo="Give the folder that 'changeover states collect' wrote.",
        ) from error
    except ValueError as error:
        raise InvalidInput(
            expected=f"JSON in {path}",
            seen=str(error),
            todo="The manifest is damaged; collect again or restore it.",
        ) from error
    if not isinstance(data, dict):
        raise InvalidInput(
            expected=f"an object in {path}", seen=type(data).__name__, todo="Restore the manifest."
        )
    return Manifest.from_json(data)
