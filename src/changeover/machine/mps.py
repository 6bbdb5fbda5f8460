"""CUDA MPS: ending one client through the control daemon.

A client that is killed with work on the GPU can leave the MPS server and its other clients undefined, and CUDA hanging
until a reboot (pytorch #32575): "terminate_client <server PID> <client PID>" of ``nvidia-cuda-mps-control`` destroys
its work first (NVIDIA, Multi-Process Service, "Client Termination"). Untested beyond the benchmark in ``benchmarks/``.
"""

from __future__ import annotations

import os

from changeover.machine.bounded import Answer, run_bounded

_CONTROL = "nvidia-cuda-mps-control"


def end_client(pid: int, timeout_s: float) -> str:
    """Empty where the daemon says that it has ended the client, else why it did not. Each question is bounded."""
    servers = _ask("get_server_list", timeout_s)
    if servers is None:
        return f"{_CONTROL} does not answer"
    for server in filter(str.isdigit, servers.split()):
        clients = _ask(f"get_client_list {server}", timeout_s) or ""
        if str(pid) in clients.split():
            said = _ask(f"terminate_client {server} {pid}", timeout_s)
            return "" if said is not None else f"{_CONTROL} did not end client {pid} of server {server}"
    return f"no MPS server of ours has pid {pid} as its client"


def _ask(command: str, timeout_s: float) -> str | None:
    """The control program reads its commands from stdin."""
    result = run_bounded([_CONTROL], timeout_s=timeout_s, env=dict(os.environ), stdin=f"{command}\n")
    return result.output if result.answer is Answer.GIVEN else None
