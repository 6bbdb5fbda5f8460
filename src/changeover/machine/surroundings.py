"""What this process can and cannot see of its machine: needed to explain memory that nobody is listed for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from changeover.machine.processes import PROC, read_pids

PID_NAMESPACE_INITIAL = 0xEFFFFFFC  # PROC_PID_INIT_INO, include/linux/proc_ns.h
MPS_COMM = "nvidia-cuda-mps"  # nvidia-cuda-mps-server and -control, cut to 15 characters
_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Surroundings:
    """``initial_pid_namespace`` is None where the kernel does not say; ``mps_pids`` are MPS's own processes;
    ``memory_only_node``: a NUMA node without processors, as GPU memory is on GH200 and GB200.
    """

    initial_pid_namespace: bool | None
    root: bool
    mps_pids: tuple[int, ...]
    memory_only_node: bool


def read_surroundings(proc: Path = PROC, nodes: Path = _NODES) -> Surroundings:
    return Surroundings(
        initial_pid_namespace=_is_initial(proc),
        root=os.geteuid() == 0,
        mps_pids=tuple(pid for pid in read_pids(proc) if _comm(proc, pid) == MPS_COMM),
        memory_only_node=bool(_node_list(nodes / "has_memory") - _node_list(nodes / "has_cpu")),
    )


def _is_initial(proc: Path) -> bool | None:
    try:
        return (proc / "self/ns/pid").stat().st_ino == PID_NAMESPACE_INITIAL
    except OSError:
        return None


def _comm(proc: Path, pid: int) -> str:
    try:
        return (proc / str(pid) / "comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return ""


def _node_list(path: Path) -> set[int]:
    """``0-1,4`` as the kernel writes lists (Documentation/admin-guide/cputopology.rst)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return set()
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
