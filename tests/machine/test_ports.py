"""Ports on the live system."""

from __future__ import annotations

import os
import socket

import pytest

from changeover.machine.local import LocalMachine
from changeover.machine.ports import read_listeners, read_port
from tests.machine import nasty


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_is_listened_on_is_not_bindable_and_its_owner_is_found(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        reading = read_port(port)
        assert not reading.bindable and reading.reason == "EADDRINUSE"
        (listener,) = [one for one in read_listeners() if one.port == port]
        assert listener.address == address
        holders = LocalMachine().holders([f"socket:[{listener.inode}]"])
        assert os.getpid() in {holder.identity.pid for holder in holders}
    assert read_port(port).bindable


def test_ipv6() -> None:
    if not socket.has_ipv6:
        return
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        assert not read_port(port).bindable
        assert [one.address for one in read_listeners() if one.port == port] == ["::1"]


def test_vllm_9737_time_wait_does_not_count() -> None:
    """vllm #9737: "address already in use" for a minute after a crash; the server itself sets SO_REUSEADDR."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # who closes first keeps TIME_WAIT
        client.close()
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("127.0.0.1", port))
    assert read_port(port).bindable


def test_asking_leaves_nothing_behind() -> None:
    port = nasty.free_port()
    assert read_port(port).bindable and read_port(port).bindable
    assert port not in {one.port for one in read_listeners()}


def test_nccl_1808_a_live_listener_is_never_connected_to() -> None:
    """NVIDIA/nccl #1808, #1936: a stray connection to the bootstrap port hangs the proxy thread."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        read_port(port)
        (listener,) = [one for one in read_listeners() if one.port == port]
        LocalMachine().holders([f"socket:[{listener.inode}]"])
        with pytest.raises(BlockingIOError):
            server.accept()
