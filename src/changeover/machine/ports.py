"""Ports: whether a server could bind one, and who listens.

Nothing here ever connects: a stray connection to an NCCL bootstrap port hangs the job behind it
(NVIDIA/nccl #1808), and a connect succeeds from the backlog of a server that is long dead while a worker
has inherited its descriptor.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from changeover.machine.processes import PROC

_ESTABLISHED, _LISTEN = "01", "0A"  # include/net/tcp_states.h


@dataclass(frozen=True)
class PortReading:
    """Whether a bind with ``SO_REUSEADDR`` on every address succeeded; ``reason`` is the errno's name if
    not.
    """

    port: int
    bindable: bool
    reason: str


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket; its owner is whoever has ``socket:[inode]`` open."""

    port: int
    address: str
    inode: int


def read_port(port: int) -> PortReading:
    """Bind as servers do: with SO_REUSEADDR, so that clients' TIME_WAIT does not count (vllm #9737)."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family is socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(("", port))
        except OSError as error:
            if family is socket.AF_INET6 and error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                continue  # a box without IPv6
            return PortReading(port, bindable=False, reason=errno.errorcode.get(error.errno or 0, str(error)))
    return PortReading(port, bindable=True, reason="")


def read_listeners(proc: Path = PROC) -> tuple[Listener, ...]:
    """Every listening TCP socket of this network namespace."""
    return tuple(
        listener
        for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6))
        for listener in _listeners(proc / "net" / name, family)
    )


def count_connections(ports: Iterable[int], proc: Path = PROC) -> int:
    """Established TCP connections to these local ports: clients that have not hung up."""
    wanted = {f"{port:04X}" for port in ports}
    return sum(
        fields[3] == _ESTABLISHED and fields[1].rsplit(":", 1)[1] in wanted
        for name in ("tcp", "tcp6")
        for fields in _rows(proc / "net" / name)
    )


def _rows(table: Path) -> Iterator[list[str]]:
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        yield line.split()


def _listeners(table: Path, family: socket.AddressFamily) -> Iterator[Listener]:
    for fields in _rows(table):
        if fields[3] == _LISTEN:
            address, port = fields[1].rsplit(":", 1)
            yield Listener(int(port, 16), _address(address, family), int(fields[9]))


def _address(text: str, family: socket.AddressFamily) -> str:
    """The kernel prints addresses as 32-bit words in host byte order."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
