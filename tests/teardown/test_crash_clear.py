"""``kill -9`` of a clear after every line of its audit, and then the same clear again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from changeover.machine.record import read_events
from changeover.teardown.audit import DELIVERED

ROOT = Path(__file__).parents[2]

SERVER = """
import os, signal, sys, time
def note(number, _frame):
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()} {signal.Signals(number).name}\\n")
for index in range(2):
    if os.fork() == 0:
        break
signal.signal(signal.SIGTERM, note)  # and lives on
open(f"{sys.argv[1]}.{os.getpid()}", "w").close()
while True: time.sleep(600)
"""

CLEARS = """
import os, signal, sys
from pathlib import Path
from changeover.machine.local import LocalMachine
from changeover.machine.record import Record
from changeover.teardown.adoption import Wish, find_trees
from changeover.teardown.audit import Audit, audit_folder, new_audit_id
from changeover.teardown.budgets import Budgets
from changeover.teardown.clear_adopted import clear_adopted
left = int(sys.argv[2])
for method in ("append", "note"):
    def wrapped(self, name, /, *, _original=getattr(Record, method), **data):
        global left
        event = _original(self, name, **data)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return event
    setattr(Record, method, wrapped)
machine = LocalMachine()
wish = Wish(pids=(int(sys.argv[1]),))
audit = Audit(audit_folder() / f"{new_audit_id()}.jsonl", machine.clock)
budgets = Budgets(terminate_s=0.3, orphans_s=0.3)
sys.exit(clear_adopted(machine, wish, find_trees(machine, wish), audit, budgets=budgets).exit_code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("lines", range(1, 40, 2))
def test_killed_after_any_line_the_next_clear_converges(tmp_path: Path, lines: int) -> None:
    """Nobody gets a second SIGTERM, whatever the first clear came to; every line that was written is there."""
    got = tmp_path / "got"
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "CHANGEOVER_LOCK_DIR": str(tmp_path)}
    leader = subprocess.Popen([sys.executable, "-S", "-c", SERVER, str(got)], start_new_session=True)
    until_s = time.monotonic() + 30.0
    while len(list(tmp_path.glob("got.*"))) < 3 and time.monotonic() < until_s:
        time.sleep(0.01)
    pids = [int(path.suffix[1:]) for path in tmp_path.glob("got.*")]
    argv = [sys.executable, "-c", CLEARS, str(leader.pid)]
    first = subprocess.run([*argv, str(lines)], env=env, cwd=ROOT, timeout=60).returncode
    if first != 0:
        assert first == -signal.SIGKILL
        audits = sorted((tmp_path / "changeover/audit").glob("*.jsonl"))
        assert len(read_events(audits[0])) == lines
        if leader.poll() is None:
            assert subprocess.run([*argv, "0"], env=env, cwd=ROOT, timeout=60).returncode == 0
        else:  # killed already, its workers perhaps not: they are found one by one
            for pid in pids:
                if Path(f"/proc/{pid}").exists() and _lives(pid):
                    once_more = [sys.executable, "-c", CLEARS, str(pid), "0"]
                    assert subprocess.run(once_more, env=env, cwd=ROOT, timeout=60).returncode == 0
    assert not any(_lives(pid) for pid in pids)
    received = Counter(got.read_text().split("\n")) if got.exists() else Counter()
    del received[""]
    assert all(count == 1 for count in received.values()), received
    delivered = [
        event
        for path in (tmp_path / "changeover/audit").glob("*.jsonl")
        for event in read_events(path)
        if event.event == DELIVERED and event.data["signal"] == "SIGTERM"
    ]
    assert len(delivered) == len({event.data["pid"] for event in delivered})
    leader.wait()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
