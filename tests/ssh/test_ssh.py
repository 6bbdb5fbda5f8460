"""The teardown over a real sshd: nothing is installed there, and a link that breaks loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

from changeover.machine import ssh as ssh_module
from changeover.machine.errors import InvalidInput
from changeover.machine.processes import read_boot_id, read_command, read_processes
from changeover.machine.record import Event
from changeover.machine.ssh import HostUnreachable, Ssh
from changeover.teardown.adoption import Wish
from changeover.teardown.budgets import Budgets
from changeover.teardown.bundle import make_bundle
from changeover.teardown.claim import claim
from changeover.teardown.clearance import Verdict
from changeover.teardown.footprint import StopPolicy
from changeover.teardown.remote import Box, NotThere, Refused, Unknown
from tests.machine import nasty
from tests.ssh.conftest import Sshd

pytestmark = pytest.mark.slow


@pytest.fixture
def box(sshd: Sshd) -> Iterator[Box]:
    with Ssh("box", config=sshd.config) as ssh:
        yield Box(ssh, patience_s=30.0)


STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
while True: time.sleep(600)
"""


@pytest.fixture
def stubborn(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server of somebody else that ignores SIGTERM, so that its end takes as long as it is given."""
    ready = tmp_path / "ready"
    one = subprocess.Popen([sys.executable, "-S", "-c", STUBBORN, str(ready)], start_new_session=True)
    while not ready.exists():
        time.sleep(0.01)
    yield one
    one.kill()
    one.wait()


def cleared(box: Box, pid: int, events: list[Event], begun: list[str], terminate_s: float = 3.0):
    wish = Wish(pids=(pid,))
    return box.clear(
        wish,
        box.find(wish),
        budgets=Budgets(terminate_s=terminate_s, orphans_s=1.0),
        stop=StopPolicy.GRACEFUL,
        token=None,
        on_started=begun.append,
        on_event=events.append,
    )


def test_the_bundle_is_the_same_bytes_each_time_and_small() -> None:
    first, second = make_bundle(), make_bundle()
    assert first == second and len(first.data) < 400_000
    names = zipfile.ZipFile(BytesIO(first.data)).namelist()
    assert "pynvml.py" in names and not any("pipeline" in name or "engines/" in name for name in names)


@pytest.mark.parametrize("python", ["python3.10", "python3.12", "python3.13"])
def test_the_bundle_runs_alone_on_other_pythons(python: str, tmp_path: Path) -> None:
    version = python.removeprefix("python")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [*pyenv.glob(f"{version}*/bin/python3"), Path(f"/usr/bin/{python}")]
    interpreter = next((path for path in found if path.exists()), None)
    if interpreter is None:
        pytest.skip(
            f"no {python} on this machine; the one that runs the tests is tried by every other test here"
        )
    (tmp_path / "changeover.pyz").write_bytes(make_bundle().data)
    argv = [str(interpreter), "-I", str(tmp_path / "changeover.pyz"), "check"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 4, 5) and "shared-memory" in done.stdout, done.stderr


def test_check_says_what_it_says_on_the_box_itself(box: Box, sshd: Sshd) -> None:
    assert {"runs", "shared-memory"} <= {one.item for one in box.check().evidence}
    sent = list((sshd.home / ".cache/changeover").glob("*.pyz"))
    assert [path.stem for path in sent] == [make_bundle().sha256]
    written = sent[0].stat().st_mtime_ns
    box.check()
    assert sent[0].stat().st_mtime_ns == written, "what is there is not sent again"
    sent[0].write_bytes(b"damaged")
    box.check()
    assert sent[0].stat().st_size > 1000, "and what is damaged is"


def test_a_server_is_cleared_and_every_line_is_seen_once(
    box: Box, sshd: Sshd, stubborn: subprocess.Popen[bytes]
) -> None:
    events: list[Event] = []
    clearance = cleared(box, stubborn.pid, events, [])
    assert clearance.verdict is Verdict.CLEAN and stubborn.poll() is not None
    assert [event.seq for event in events] == list(range(len(events)))
    assert events[0].event == "clear.asked" and events[-1].event == "clear.cleared"
    folder, until_s = Path(sshd.home) / "state/changeover/audit", time.monotonic() + 10.0
    while [path.suffix for path in folder.iterdir()] != [".jsonl"] and time.monotonic() < until_s:
        time.sleep(0.05)  # the worker tidies up after its last line
    assert [path.suffix for path in folder.iterdir()] == [".jsonl"], "nothing but the audit is kept"


def test_prime_rl_2331_a_shell_whose_line_holds_every_pattern_lives(
    box: Box, stubborn: subprocess.Popen[bytes]
) -> None:
    """PrimeIntellect-ai/prime-rl PR #2331: the cleaner's own pattern was in its own shell's line."""
    words = f"python3 changeover sglang::scheduler vllm serve {stubborn.pid}"
    with subprocess.Popen(["bash", "-c", f"sleep 600; : {words}"], start_new_session=True) as decoy:
        cleared(box, stubborn.pid, [], [], terminate_s=0.5)
        lives = decoy.poll() is None
        os.killpg(decoy.pid, signal.SIGKILL)
    assert lives


def test_vfs_8_the_link_is_cut_and_the_teardown_is_found_again(
    box: Box, sshd: Sshd, stubborn: subprocess.Popen[bytes]
) -> None:
    """c9/vfs #8, vscode-remote-release #258: a dropped client. Here the server's side of the connection is killed."""
    events: list[Event] = []

    def cut(event: Event) -> None:
        events.append(event)
        if event.event == "clear.delivered" and not cuts:
            cuts.append(1)
            for pid in _connections(sshd):
                os.kill(pid, signal.SIGKILL)

    cuts: list[int] = []
    wish = Wish(pids=(stubborn.pid,))
    clearance = box.clear(
        wish,
        box.find(wish),
        budgets=Budgets(terminate_s=4.0, orphans_s=1.0),
        stop=StopPolicy.GRACEFUL,
        token=None,
        on_started=lambda _identity: None,
        on_event=cut,
    )
    assert cuts and clearance.verdict is Verdict.CLEAN and stubborn.poll() is not None
    assert [event.seq for event in events] == list(range(len(events))), "no line twice, none lost"


def test_a_dead_link_is_unknown_never_clean_and_can_be_come_back_to(
    sshd: Sshd, stubborn: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_module, "_ALIVE_S", 1)
    monkeypatch.setattr(ssh_module, "_ALIVE_COUNT", 1)
    monkeypatch.setattr(ssh_module, "_CONNECT_S", 2)
    begun: list[str] = []

    def freeze(event: Event) -> None:
        if event.event == "clear.delivered" and not frozen:
            frozen.extend((sshd.process.pid, *_connections(sshd)))
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)

    frozen: list[int] = []
    with Ssh("box", config=sshd.config) as ssh:
        box = Box(ssh, patience_s=4.0)
        trees = box.find(Wish(pids=(stubborn.pid,)))
        budgets = Budgets(terminate_s=2.0, orphans_s=1.0)
        with pytest.raises(Unknown, match="is unknown") as unknown:
            box.clear(
                Wish(pids=(stubborn.pid,)),
                trees,
                budgets=budgets,
                stop=StopPolicy.GRACEFUL,
                token=None,
                on_started=begun.append,
                on_event=freeze,
            )
    assert unknown.value.exit_code == 6 and begun[0] in unknown.value.todo
    for pid in frozen:
        if nasty.alive(pid):
            os.kill(pid, signal.SIGCONT)
    with Ssh("box", config=sshd.config) as ssh:
        clearance = Box(ssh, patience_s=30.0).attach(begun[0], 0, lambda _event: None)
    assert clearance.verdict is Verdict.CLEAN and stubborn.poll() is not None


def test_ctrl_c_here_ends_nothing_there(
    sshd: Sshd, stubborn: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    argv = [sys.executable, "-m", "changeover", "clear", "--host", "box", "--ssh-config", str(sshd.config)]
    argv += ["--pid", str(stubborn.pid), "--yes", "--total-timeout", "12"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as command:
        assert command.stderr is not None
        said = ""
        while "SIGTERM to pid" not in said:
            line = command.stderr.readline()
            assert line, said
            said += line
        command.send_signal(signal.SIGINT)
        rest = command.stderr.read()
    assert command.returncode == 130 and "it goes on there" in rest
    identity = rest.rpartition("--attach ")[2].split()[0]
    argv = [sys.executable, "-m", "changeover", "clear", "--host", "box", "--ssh-config", str(sshd.config)]
    done = subprocess.run(
        [*argv, "--attach", identity, "--json"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and json.loads(done.stdout)["verdict"] == "clean", done.stderr
    assert stubborn.poll() is not None


def test_two_at_once_are_one_too_many(box: Box, sshd: Sshd, stubborn: subprocess.Popen[bytes]) -> None:
    with (
        claim("somebody else", path=sshd.home / "machine.lock"),
        pytest.raises(Refused, match="somebody else") as no,
    ):
        cleared(box, stubborn.pid, [], [])
    assert no.value.exit_code == 5 and stubborn.poll() is None


def test_wrong_wishes_come_back_as_they_are_there(box: Box) -> None:
    with pytest.raises(Refused, match="nobody has that pid") as refused:
        box.find(Wish(pids=(2**22 + 5,)))
    assert refused.value.exit_code == 2


def test_a_host_that_is_an_option_is_refused() -> None:
    for wrong in ("-oProxyCommand=touch /tmp/x", "", "a b"):
        with pytest.raises(InvalidInput, match="a host as ssh takes it"):
            Ssh(wrong)


def test_who_cannot_be_reached_says_why(sshd: Sshd) -> None:
    empty = sshd.folder / "nobody"
    empty.touch()
    sshd.host("unknown-key", UserKnownHostsFile=str(empty), StrictHostKeyChecking="yes")
    with (
        Ssh("unknown-key", config=sshd.config) as ssh,
        pytest.raises(HostUnreachable, match="connect once by hand"),
    ):
        Box(ssh).check()
    (sshd.folder / "authorized").write_text("")
    with (
        Ssh("box", config=sshd.config) as ssh,
        pytest.raises(HostUnreachable, match="Permission denied") as refused,
    ):
        Box(ssh).check()
    assert refused.value.exit_code == 6


def _python(sshd: Sshd, text: str) -> None:
    """Puts its own python3 first on the PATH of commands over this sshd."""
    programs = sshd.folder / "bin"
    programs.mkdir()
    (programs / "python3").write_text(text)
    (programs / "python3").chmod(0o755)
    sshd.environment(PATH=f"{programs}:/usr/bin:/bin")


def test_no_python_there(sshd: Sshd) -> None:
    sshd.environment(PATH="/nowhere")
    with (
        Ssh("box", config=sshd.config) as ssh,
        pytest.raises(HostUnreachable, match=r"Python 3\.10 or newer"),
    ):
        Box(ssh).check()


def test_an_old_python_there(sshd: Sshd) -> None:
    _python(
        sshd,
        f"#!{sys.executable}\nimport sys\nsys.version_info = (3, 8, 10)\nsys.version = '3.8.10 (old)'\n"
        "exec(sys.argv[2])\n",
    )
    with Ssh("box", config=sshd.config) as ssh, pytest.raises(NotThere, match=r"saw Python 3\.8\.10"):
        Box(ssh).check()


def test_a_noisy_login_and_a_home_that_cannot_be_written(sshd: Sshd) -> None:
    _python(sshd, f'#!/bin/sh\necho Welcome to the box!\necho\nexec {sys.executable} "$@"\n')
    (sshd.home / ".cache").write_text("a file where the folder should be")
    with Ssh("box", config=sshd.config) as ssh:
        assert Box(ssh).check().evidence
    (sent,) = Path(f"/tmp/changeover-{os.getuid()}").glob(f"{make_bundle().sha256}.pyz")
    sent.unlink()


def _connections(sshd: Sshd) -> list[int]:
    """The processes that serve a connection: below the listening one, or named so by newer versions."""
    everybody = read_processes(read_boot_id())
    below = {pid for pid, one in everybody.items() if one.ppid == sshd.process.pid}
    below |= {pid for pid, one in everybody.items() if one.ppid in below and "sshd" in one.comm}
    return [pid for pid in below if read_command(pid)]
