"""Fresh contexts on GPUs, each in a child that ends: made in-process, the verifier would be the holder."""

from __future__ import annotations

from collections.abc import Sequence

from changeover.machine.amd_gpus import read_hip_context
from changeover.machine.amd_probe import UUID_PREFIX
from changeover.machine.bounded import BoundedChild
from changeover.machine.gpus import ContextReading, begin_cuda_context, context_reading


class FreshContexts:
    """Children can be started before they are needed: starting Python takes longer than making the context."""

    def __init__(self) -> None:
        self._waiting: dict[str, BoundedChild] = {}

    def prepare(self, uuids: Sequence[str]) -> None:
        """Start a child for each NVIDIA GPU that has none; it opens no device before it is asked."""
        for uuid in uuids:
            if uuid not in self._waiting and not uuid.startswith(UUID_PREFIX):
                self._waiting[uuid] = begin_cuda_context(uuid)

    def make(self, uuids: Sequence[str], timeout_s: float) -> tuple[ContextReading, ...]:
        """One on each GPU, all at once; in the order given. A child answers once."""
        if not uuids:
            return ()
        from concurrent.futures import ThreadPoolExecutor  # 10 ms that a machine without a GPU need not pay

        self.prepare(uuids)
        children = [self._waiting.pop(uuid, None) for uuid in uuids]
        with ThreadPoolExecutor(len(uuids)) as pool:
            return tuple(pool.map(lambda uuid, child: _made(uuid, child, timeout_s), uuids, children))

    def close(self) -> None:
        for child in self._waiting.values():
            child.end()
        self._waiting.clear()


def _made(uuid: str, child: BoundedChild | None, timeout_s: float) -> ContextReading:
    if child is None:
        return read_hip_context(uuid, timeout_s)
    return context_reading(uuid, child.finish("now\n", timeout_s), timeout_s)
