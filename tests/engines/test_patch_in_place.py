"""The installed files themselves: patched whole, brought back byte for byte, also by a process that is killed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from changeover.engines.patch.in_place import (
    BACKUP,
    Change,
    PackageInUse,
    apply_in_place,
    backup_of,
    restore_in_place,
)
from changeover.engines.patch.installed import Installed, holders, model_files, state_of
from changeover.engines.patch.source import MARK, SourceState, patched
from changeover.machine.clock import SystemClock
from changeover.machine.errors import InvalidInput
from tests.engines.sglang_tree import FILES, MODEL, as_made, contents, make_sglang

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("patch_worker.py")
KNOWN = ("llama.py", "qwen2.py")
STEP_LIMIT = 60


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    return make_sglang(tmp_path / "env")


def apply(installed: Installed) -> dict[str, Change]:
    return by_name(apply_in_place(installed, journal(installed), SystemClock(), look=nobody_has_it))


def restore(installed: Installed) -> dict[str, Change]:
    return by_name(restore_in_place(installed, journal(installed), SystemClock(), look=nobody_has_it))


def nobody_has_it(_: Installed) -> list[str]:
    return []


def by_name(changes: list[Change]) -> dict[str, Change]:
    return {change.name: change for change in changes}


def journal(installed: Installed) -> Path:
    return installed.package.parents[4] / "journal.jsonl"


def test_it_goes_in_and_comes_out_byte_for_byte(installed: Installed) -> None:
    before = {path.name: path.stat() for path in installed.models.iterdir()}
    (installed.models / "llama.py").chmod(0o640)
    changed = apply(installed)
    assert {name: (it.state, it.note) for name, it in changed.items()} == {
        "deepseek_v2.py": (SourceState.UNKNOWN, "left alone"),
        "llama.py": (SourceState.PATCHED, "patched"),
        "qwen2.py": (SourceState.PATCHED, "patched"),
    }
    now = contents(installed)
    assert all(now[name] == patched(FILES[name]).encode() for name in KNOWN)
    assert all(now[name + BACKUP] == FILES[name].encode() for name in KNOWN)
    assert (installed.models / "llama.py").stat().st_mode & 0o777 == 0o640
    assert {it.note for name, it in restore(installed).items() if name in KNOWN} == {"restored"}
    assert contents(installed) == as_made()
    after = {path.name: path.stat() for path in installed.models.iterdir()}
    assert after["qwen2.py"].st_mtime_ns == before["qwen2.py"].st_mtime_ns
    assert after["llama.py"].st_mode & 0o777 == 0o640


def test_twice_is_as_once(installed: Installed) -> None:
    apply(installed)
    once = contents(installed)
    assert {it.note for name, it in apply(installed).items() if name in KNOWN} == {"was already"}
    assert contents(installed) == once
    restore(installed)
    assert {it.note for it in restore(installed).values()} == {"is as it was"}


def test_the_journal_says_what_was_changed_before_it_was(installed: Installed) -> None:
    apply(installed)
    restore(installed)
    events = [json.loads(line) for line in journal(installed).read_text().splitlines()]
    assert [event["event"] for event in events] == ["patch.begin", "patch.done"] * 2 + [
        "restore.begin",
        "restore.done",
    ] * 2
    assert events[0]["data"]["before"] == events[4]["data"]["after"]
    assert events[0]["data"]["after"] == events[4]["data"]["before"]


def test_an_inode_that_an_installers_cache_shares_is_never_written_into(
    installed: Installed, tmp_path: Path
) -> None:
    cached = tmp_path / "cache-of-uv"
    os.link(installed.models / "llama.py", cached)
    apply(installed)
    assert cached.read_text() == MODEL
    restore(installed)
    assert cached.read_text() == MODEL


def test_line_ends_of_windows_come_back(installed: Installed) -> None:
    theirs = MODEL.replace("\n", "\r\n").encode()
    (installed.models / "llama.py").write_bytes(theirs)
    apply(installed)
    assert state_of((installed.models / "llama.py").read_bytes()) is SourceState.PATCHED
    restore(installed)
    assert (installed.models / "llama.py").read_bytes() == theirs


def test_bytecode_of_the_other_text_is_removed(installed: Installed) -> None:
    """Same second, same size: Python would go on running what was compiled from the patched text."""
    compiled = installed.models / "__pycache__" / "llama.cpython-312.pyc"
    kept = installed.models / "__pycache__" / "deepseek_v2.cpython-312.pyc"
    compiled.parent.mkdir(exist_ok=True)
    for action in (apply, restore):
        compiled.write_bytes(b"")
        kept.write_bytes(b"")
        action(installed)
        assert not compiled.exists() and kept.exists()


def test_what_was_edited_since_is_left_as_it_is(installed: Installed) -> None:
    apply(installed)
    path = installed.models / "llama.py"
    edited = path.read_text() + "# mine\n"
    path.write_text(edited)
    changes = restore(installed)
    assert changes["llama.py"].state is SourceState.EDITED
    assert backup_of(path).name in changes["llama.py"].note
    assert path.read_text() == edited and backup_of(path).read_text() == MODEL
    assert (installed.models / "qwen2.py").read_text() == FILES["qwen2.py"]
    assert apply(installed)["llama.py"].note == "left alone" and path.read_text() == edited


def test_a_sglang_that_was_installed_over_a_patched_one(installed: Installed) -> None:
    """pip leaves our copies beside, of the version before; they are neither used nor thrown away."""
    apply(installed)
    newer = MODEL + "# newer\n"
    path = installed.models / "llama.py"
    path.write_text(newer)
    assert "of another version" in apply(installed)["llama.py"].note
    assert "of another version" in restore(installed)["llama.py"].note
    assert path.read_text() == newer and backup_of(path).read_text() == MODEL


def test_a_lost_copy_is_not_needed(installed: Installed) -> None:
    apply(installed)
    backup_of(installed.models / "llama.py").unlink()
    restore(installed)
    assert contents(installed) == as_made()


def test_two_at_once_are_refused(installed: Installed) -> None:
    folder = os.open(installed.models, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(PackageInUse, match="another `changeover patch`"):
        apply(installed)
    os.close(folder)
    assert contents(installed) == as_made()


def test_where_we_may_not_write_the_copy_is_named(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(InvalidInput, match="without --in-place"):
        apply(installed)
    assert {it.note for it in restore(installed).values()} == {"is as it was"}


@pytest.fixture
def server(installed: Installed) -> Iterator[subprocess.Popen[bytes]]:
    """Has a file of the environment mapped, as a server has its kernels."""
    library = installed.package.parent / "kernels.so"
    library.write_bytes(b"\0" * 4096)
    code = (
        "import mmap, sys, time\nfile = open(sys.argv[1], 'rb')\n"
        "held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\nprint('.', flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(library)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        yield child
        child.kill()


def test_while_somebody_has_it_loaded_it_is_refused_and_nobody_is_harmed(
    installed: Installed, server: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(PackageInUse, match=f"pid {server.pid} ") as refused:
        apply_in_place(installed, journal(installed), SystemClock())
    assert refused.value.exit_code == 5
    assert contents(installed) == as_made() and server.poll() is None
    server.kill()
    server.wait()
    apply_in_place(installed, journal(installed), SystemClock())
    assert MARK in (installed.models / "llama.py").read_text()


def test_a_server_is_known_by_its_title_and_an_editor_is_not(tmp_path: Path) -> None:
    titles = ["sglang::scheduler", "vim sglang/srt/models/llama.py", "grep -m sglang file"]
    running = [subprocess.Popen(["bash", "-c", 'exec -a "$0" sleep 600', title]) for title in titles]
    try:
        pids = [f"pid {one.pid} " for one in running]
        deadline = time.monotonic() + 10
        while True:
            found = holders([tmp_path / "nothing"])
            seen = [any(line.startswith(pid) for line in found) for pid in pids]
            if seen[0] or time.monotonic() > deadline:
                break
        assert seen == [True, False, False]
    finally:
        for one in running:
            one.kill()
            one.wait()


def killed_at(folder: Path, action: str, step: int) -> bool:
    """Whether the worker was killed before its end."""
    done = subprocess.run(
        [sys.executable, str(WORKER), str(folder), action, str(step)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


@pytest.mark.parametrize("action", ["apply", "restore"])
@pytest.mark.parametrize("then", ["again", "other"])
def test_kill_9_at_any_step(tmp_path: Path, action: str, then: str) -> None:
    """At every step on the disk: no file is ever anything but whole, and either command comes to its end."""
    installed = make_sglang(tmp_path / "made" / "env")
    if action == "restore":
        apply(installed)
    kept = tmp_path / "kept"
    shutil.copytree(installed.models, kept, ignore=shutil.ignore_patterns("__pycache__"))
    wholes = {name: {text.encode(), patched(text).encode()} for name, text in FILES.items() if name in KNOWN}
    whole_steps = 0
    for step in range(1, STEP_LIMIT):
        shutil.rmtree(installed.models)
        shutil.copytree(kept, installed.models)
        folder = tmp_path / "made"
        told = {"python": installed.python, "version": "0.5.23", "package": str(installed.package)}
        (folder / "installed.json").write_text(json.dumps(told))
        if not killed_at(folder, action, step):
            whole_steps = step - 1
            break
        now = contents(installed)
        assert all(now[name] in wholes[name] for name in KNOWN), f"killed at step {step}"
        if (action == "apply") == (then == "again"):
            apply(installed)
            assert all(it.state is not SourceState.ORIGINAL for it in model_files(installed))
        restore(installed)
        assert contents(installed) == as_made(), f"killed at step {step}"
    assert whole_steps > 10
