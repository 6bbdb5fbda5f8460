"""Reading /proc: text that lies, and the live system."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from changeover.machine import processes
from changeover.machine.processes import (
    OpenPath,
    ProcessTable,
    parse_stat,
    read_boot_id,
    read_command,
    read_cookie,
    read_open_paths,
    read_process,
    read_processes,
    redacted,
)
from tests.machine import nasty

BOOT = read_boot_id()
STAT = "{pid} ({comm}) {state} 10 20 30 0 -1 {flags} 0 0 0 0 5 7 0 0 20 0 1 0 {start} 1000 256 0 0 0"


def parsed(comm: str = "x", *, state: str = "S", flags: int = 0) -> processes.ProcessFacts:
    text = STAT.format(pid=42, comm=comm, state=state, flags=flags, start=123456)
    return parse_stat(text, uid=0, boot_id="boot", living_tasks=1)


@given(comm=st.text(alphabet=st.characters(blacklist_categories=["Cs"]), max_size=15))
def test_any_name_that_a_process_can_take_is_split_off(comm: str) -> None:
    facts = parsed(comm)
    assert (facts.comm, facts.state, facts.ppid, facts.pgid, facts.sid) == (comm, "S", 10, 20, 30)
    assert facts.identity.start_ticks == 123456 and facts.cpu_ticks == 12


def test_a_name_that_looks_like_fields() -> None:
    assert parsed("a b) R 1 (x", state="T").state == "T"


def test_a_process_that_dumps_core() -> None:
    assert parsed(flags=0x200).dumping_core and not parsed(flags=0x400).dumping_core


def test_ourselves() -> None:
    own = read_process(os.getpid(), BOOT)
    assert own is not None and own.alive
    assert (own.ppid, own.sid, own.pgid) == (os.getppid(), os.getsid(0), os.getpgid(0))
    assert own.rss_mib > 1 and own.uid == os.getuid()
    assert read_processes(BOOT)[os.getpid()].identity == own.identity


def test_nobody() -> None:
    assert read_process(2**22 + 1, BOOT) is None
    assert (
        read_cookie(2**22 + 1) is None and read_command(2**22 + 1) == () and read_open_paths(2**22 + 1) == ()
    )


@pytest.mark.parametrize("value", ["secret", ""])
def test_the_cookie_of_a_child(value: str) -> None:
    environment = {
        **nasty.environment_without_cookie(),
        "CHANGEOVER_COOKIE": value,
        "NOT_CHANGEOVER_COOKIE": "no",
    }
    code = "print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert read_cookie(child.pid) == value
        child.communicate(b"\n")


def test_no_cookie() -> None:
    environment = {**nasty.environment_without_cookie(), "NOT_CHANGEOVER_COOKIE": "no"}
    code = "print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert read_cookie(child.pid) is None
        child.communicate(b"\n")


def test_open_files_say_whether_they_are_written(tmp_path: Path) -> None:
    written, only_read = tmp_path / "written", tmp_path / "read"
    only_read.write_text("x")
    with written.open("w"), only_read.open():
        found = read_open_paths(os.getpid())
    assert OpenPath(str(written), writable=True, mapped=False) in found
    assert OpenPath(str(only_read), writable=False, mapped=False) in found


def test_descriptors_of_a_process_whose_main_thread_has_ended(tmp_path: Path) -> None:
    """/proc/PID/fd is empty then; the port is in /proc/PID/task/TID/fd."""
    report = tmp_path / "report"
    environment = {**os.environ, "NASTY_REPORT": str(report), "PORT": str(nasty.free_port())}
    with subprocess.Popen(nasty.argv("zombie_leader"), env=environment) as child:
        try:
            nasty.wait_for_report(report, report)
            leader = read_process(child.pid, BOOT)
            assert leader is not None and leader.state == "Z" and leader.alive and leader.living_tasks == 1
            assert os.listdir(f"/proc/{child.pid}/fd") == []
            assert any(one.path.startswith("socket:") for one in read_open_paths(child.pid))
        finally:
            child.kill()


def test_a_true_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    zombie = read_process(child.pid, BOOT)
    assert zombie is not None and zombie.state == "Z" and not zombie.alive and zombie.living_tasks == 0
    child.wait()
    assert read_process(child.pid, BOOT) is None or read_process(child.pid, BOOT) != zombie


def test_a_process_with_many_threads_is_one_process() -> None:
    waiting = threading.Event()
    threads = [threading.Thread(target=waiting.wait) for _ in range(5)]
    for thread in threads:
        thread.start()
    own = read_process(os.getpid(), BOOT)
    assert own is not None and own.living_tasks == 1  # counted only where the main thread is dead
    waiting.set()


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (("serve", "--api-key", "abc", "--port", "1"), "serve --api-key *** --port 1"),
        (("serve", "--hf-token=abc", "--model=x"), "serve --hf-token=*** --model=x"),
        (("x", "a\n  b"), "x a b"),
        (("x", "y" * 200), ("x " + "y" * 200)[:117] + "..."),
        ((), ""),
    ],
)
def test_secrets_in_a_command_line_are_masked(argv: tuple[str, ...], shown: str) -> None:
    assert redacted(argv) == shown


def _put(proc: Path, pid: int, **facts: str | int) -> None:
    folder = proc / str(pid) / "task" / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    text = STAT.format(**{"pid": pid, "comm": "x", "state": "S", "flags": 0, "start": 1, **facts})
    for path in (proc / str(pid) / "stat", folder / "stat"):
        path.write_text(text)


def test_a_table_takes_apart_only_what_has_changed_and_forgets_nobodys_change(tmp_path: Path) -> None:
    for pid in (10, 11, 12):
        _put(tmp_path, pid)
    table = ProcessTable("boot", tmp_path)
    first = table.read()
    _put(tmp_path, 11, start=2)  # another process under the same pid
    (tmp_path / "12" / "stat").unlink()
    _put(tmp_path, 13)
    second = table.read()
    assert second[10] is first[10] and set(second) == {10, 11, 13}
    assert (first[11].identity.start_ticks, second[11].identity.start_ticks) == (1, 2)
    assert second == read_processes("boot", tmp_path)


def test_a_tables_process_whose_main_thread_is_dead_is_asked_for_its_threads_each_time(
    tmp_path: Path,
) -> None:
    """Its own line stays the same while another thread lives, and when that one dies too."""
    _put(tmp_path, 10, state="Z")
    thread = tmp_path / "10" / "task" / "15"
    thread.mkdir()
    (thread / "stat").write_text(STAT.format(pid=15, comm="x", state="S", flags=0, start=1))
    table = ProcessTable("boot", tmp_path)
    assert table.read()[10].alive
    (thread / "stat").write_text(STAT.format(pid=15, comm="x", state="Z", flags=0, start=1))
    assert not table.read()[10].alive
