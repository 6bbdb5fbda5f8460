"""Ports in a network namespace of the test's own, where 8000 is free and nobody else can take it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace of one's own needs root")

_BEGIN = """
import json, os, signal, socket, subprocess, sys, time
from pathlib import Path
from changeover.machine.local import LocalMachine
from changeover.machine.ports import read_port
from changeover.teardown.budgets import Budgets
from changeover.teardown.clear import clear
from changeover.teardown.footprint import Target, take_baseline
from tests.machine import nasty
PORT = 8000
UP = (  # SIOCSIFFLAGS, IFF_UP: a new namespace's lo is down (netdevice(7)); without a package for `ip`
    "import fcntl, socket, struct, sys, time;"
    "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh', b'lo', 1));"
)
exec(UP)
LISTEN = UP + (
    "s = socket.create_server(('127.0.0.1', 8000));"
    "open(sys.argv[1], 'w').close(); time.sleep(600)"
)
machine, folder = LocalMachine(), Path(sys.argv[1])
baseline = take_baseline(machine)
short = Budgets(total_s=40.0, terminate_s=1.0, orphans_s=1.0, kill_s=10.0, ports_s=4.0, foreign_patience_s=0.5)
def until(what):
    end_s = time.monotonic() + 20.0
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.01)
def stranger():
    ready = folder / "stranger"
    child = subprocess.Popen([sys.executable, "-S", "-c", LISTEN, str(ready)], start_new_session=True)
    until(ready.exists)
    return child
"""
_TIME_WAIT = """
server = socket.create_server(("127.0.0.1", PORT))
client = socket.create_connection(("127.0.0.1", PORT))
accepted, _ = server.accept()
accepted.close(); client.close(); server.close()
try:
    socket.socket().bind(("127.0.0.1", PORT)); plain = "bound"
except OSError as error:
    plain = error.strerror
said = {"plain": plain, "ours": read_port(PORT).bindable}
"""
_STRANGER_BETWEEN = """
one = nasty.start(machine, folder, "listener", cookie="secret", env={"PORT": str(PORT)})
target = one.owned.target("server", ports=(PORT,))
first = clear(machine, [target], baseline, budgets=short)
other = stranger()
second = clear(machine, [target], baseline, budgets=short)
seen = next(each.seen for each in second.evidence if each.item == "port:8000")
said = {"first": first.verdict.value, "second": second.verdict.value, "exit": second.exit_code,
        "named": f"pid {other.pid} " in seen, "lives": other.poll() is None, "signals": len(second.signals)}
other.kill()
"""
_OTHER_NAMESPACE = """
one = nasty.start(machine, folder, "listener", cookie="secret", env={"PORT": str(PORT)})
ready = folder / "elsewhere"
other = subprocess.Popen(["unshare", "--net", sys.executable, "-S", "-c", LISTEN, str(ready)], start_new_session=True)
until(ready.exists)
clearance = clear(machine, [one.owned.target("server", ports=(PORT,))], baseline, budgets=short)
said = {"verdict": clearance.verdict.value, "lives": other.poll() is None}
os.killpg(other.pid, signal.SIGKILL)
"""


def run_there(tmp_path: Path, script: str) -> dict[str, Any]:
    code = f"{_BEGIN}\n{script}\nprint(json.dumps(said))"
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", code, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_vllm_9737_a_connection_in_time_wait_keeps_only_those_out_who_do_not_ask_for_reuse(
    tmp_path: Path,
) -> None:
    assert run_there(tmp_path, _TIME_WAIT) == {"plain": "Address already in use", "ours": True}


def test_vllm_7514_skyrl_284_roll_87_a_stranger_takes_the_port_between_two_phases(tmp_path: Path) -> None:
    said = run_there(tmp_path, _STRANGER_BETWEEN)
    assert said == {
        "first": "clean",
        "second": "foreign_holder",
        "exit": 5,
        "named": True,
        "lives": True,
        "signals": 0,
    }


def test_the_same_port_in_another_namespace_is_in_nobodys_way(tmp_path: Path) -> None:
    assert run_there(tmp_path, _OTHER_NAMESPACE) == {"verdict": "clean", "lives": True}
