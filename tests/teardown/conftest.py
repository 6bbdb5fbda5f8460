"""A real machine with real processes, all gone at the end whatever the test did."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from changeover.machine.local import LocalMachine
from tests.machine import nasty

StartNasty = Callable[..., nasty.Nasty]


@pytest.fixture
def machine() -> LocalMachine:
    return LocalMachine()


@pytest.fixture
def start_nasty(machine: LocalMachine, tmp_path: Path) -> Iterator[StartNasty]:
    started: list[nasty.Nasty] = []

    def start(name: str, *, cookie: str = "this-test's-secret", **env: str) -> nasty.Nasty:
        one = nasty.start(machine, tmp_path, name, cookie=cookie, env=env)
        started.append(one)
        return one

    yield start
    for one in started:
        for pid in (one.pid, *(value for value in one.facts.values() if isinstance(value, int))):
            if nasty.alive(pid):
                os.kill(pid, signal.SIGKILL)
        machine.reap(one.owned.identity)
