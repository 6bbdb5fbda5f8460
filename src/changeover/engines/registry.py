"""Engines by name."""

from __future__ import annotations

from changeover.engines.embedded.engine import EmbeddedEngine
from changeover.engines.protocol import Engine
from changeover.engines.sglang import SglangEngine
from changeover.engines.vllm import VllmEngine
from changeover.machine.errors import InvalidInput

_ENGINES: dict[str, Engine] = {
    engine.kind: engine for engine in (EmbeddedEngine(), SglangEngine(), VllmEngine())
}


def get_engine(kind: str) -> Engine:
    """The engine with this name; raises InvalidInput for any other."""
    try:
        return _ENGINES[kind]
    except KeyError:
        raise InvalidInput(
            expected=f"an engine, one of {', '.join(sorted(_ENGINES))}",
            seen=repr(kind),
            todo="Set engine.kind in the pipeline file.",
        ) from None
