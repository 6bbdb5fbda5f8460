"""What a collection is asked to do, checked when it is made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from changeover.machine.errors import InvalidInput
from changeover.states.conventions import check_boundaries
from changeover.states.manifest import Codec, Manifest

_MIB = 1024 * 1024
_PATHS = ("prompts", "out", "capture_dir", "model_path")


@dataclass(frozen=True)
class CollectParams:
    """One collection.

    ``url`` is the capture server's; ``capture_dir`` the folder into which it writes, seen from here;
    ``boundaries`` are the ones it was started with; ``hidden``, ``layers`` and ``vocab`` are the target's,
    ``model_path`` its folder. ``limit`` None takes all prompts. At most ``staging_budget_bytes`` of captured
    files wait to be stored; the collection stops, resumable, before less than ``disk_reserve_bytes`` are
    free. A request that fails for a reason that may pass is tried ``max_attempts`` times.
    """

    url: str
    prompts: Path
    out: Path
    capture_dir: Path
    model_path: Path
    hidden: int
    layers: int
    vocab: int
    boundaries: tuple[int, ...]
    model_name: str | None = None
    model_sha256: str | None = None
    engine_kind: str = "embedded"
    engine_version: str | None = None
    profile: str = "capture"
    limit: int | None = None
    max_tokens: int = 128
    concurrency: int = 8
    held_out_fraction: float = 0.1
    codec: Codec = "none"
    staging_budget_bytes: int = 512 * _MIB
    disk_reserve_bytes: int = 1024 * _MIB
    timeout_s: float = 600.0
    max_attempts: int = 3
    retry_delay_s: float = 0.5

    @classmethod
    def from_json(cls, params: Mapping[str, Any]) -> CollectParams:
        """From a job's parameters (paths as strings, tuples as lists). Raises InvalidInput for strange
        names.
        """
        known = {field.name for field in fields(cls)}
        needed = {field.name for field in fields(cls)} - set(cls.__dict__)
        if strange := sorted(set(params) - known):
            raise InvalidInput(
                expected=f"only {', '.join(sorted(known))}",
                seen=", ".join(strange),
                todo="Correct the parameters.",
            )
        if missing := sorted(needed - set(params)):
            raise InvalidInput(
                expected=f"{', '.join(sorted(needed))}", seen=f"no {', '.join(missing)}", todo="Add them."
            )
        values = dict(params) | {name: Path(params[name]) for name in _PATHS}
        values["boundaries"] = tuple(params["boundaries"])
        return cls(**values)

    def __post_init__(self) -> None:
        check_boundaries(self.boundaries, self.layers)
        least = {"max_tokens": 2, "concurrency": 1, "max_attempts": 1, "staging_budget_bytes": 1, "hidden": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise InvalidInput(
                    expected=f"{name} of at least {low}",
                    seen=str(getattr(self, name)),
                    todo=f"Give a larger {name}.",
                )
        if not 0 <= self.held_out_fraction < 1:
            raise InvalidInput(
                expected="a held-out share from 0 to below 1",
                seen=str(self.held_out_fraction),
                todo="E.g. 0.1.",
            )

    def manifest(self) -> Manifest:
        """The manifest of a new folder; reads the tokenizer and template at ``model_path``."""
        return Manifest(
            hidden=self.hidden,
            layers=self.layers,
            vocab=self.vocab,
            boundaries=tuple(self.boundaries),
            last_norm="post",
            codec=self.codec,
            model_name=self.model_name,
            model_path=str(self.model_path),
            model_sha256=self.model_sha256,
            engine_kind=self.engine_kind,
            engine_version=self.engine_version,
            profile=self.profile,
            tokenizer_sha256=_sha256_of(self.model_path / "tokenizer.json"),
            chat_template_sha256=_chat_template_sha256(self.model_path),
            held_out_fraction=self.held_out_fraction,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def _sha256_of(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _chat_template_sha256(model_path: Path) -> str | None:
    """Of ``chat_template.jinja`` where there is one, else of the template inside
    ``tokenizer_config.json``.
    """
    if (own_file := _sha256_of(model_path / "chat_template.jinja")) is not None:
        return own_file
    try:
        template = json.loads((model_path / "tokenizer_config.json").read_text()).get("chat_template")
    except (OSError, ValueError):
        return None
    return None if template is None else hashlib.sha256(json.dumps(template).encode()).hexdigest()
