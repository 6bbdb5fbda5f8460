"""The states store: what other rooms import (docs/design.md, "States")."""

from __future__ import annotations

from changeover.states.errors import StoreBusy, StoreDamaged, StoreFull
from changeover.states.layout import Entry, Sample
from changeover.states.manifest import Manifest, read_manifest
from changeover.states.reader import StatesReader
from changeover.states.writer import DEFAULT_SHARD_BYTES, StatesWriter

__all__ = [
    "DEFAULT_SHARD_BYTES",
    "Entry",
    "Manifest",
    "Sample",
    "StatesReader",
    "StatesWriter",
    "StoreBusy",
    "StoreDamaged",
    "StoreFull",
    "read_manifest",
]
