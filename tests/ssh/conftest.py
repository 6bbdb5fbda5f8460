"""A real sshd on loopback, with its own keys and its own configuration."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from changeover.machine.ports import read_listeners


@dataclass
class Sshd:
    """``config`` is what ``ssh -F`` takes: the host ``box`` is this machine through that sshd."""

    process: subprocess.Popen[bytes]
    port: int
    folder: Path
    config: Path
    home: Path

    def environment(self, **more: str) -> None:
        """What commands over this sshd find in their environment; read by sshd at each login."""
        own = {"XDG_STATE_HOME": f"{self.home}/state", "CHANGEOVER_LOCK_DIR": str(self.home)}
        lines = {"HOME": str(self.home), **own, **more}
        (self.folder / "environment").write_text(
            "".join(f"{name}={value}\n" for name, value in lines.items())
        )
        key = (self.folder / "id.pub").read_text()
        options = ",".join(f'environment="{name}={value}"' for name, value in lines.items())
        (self.folder / "authorized").write_text(f"{options} {key}")
        (self.folder / "authorized").chmod(0o600)

    def host(self, name: str, **settings: str) -> None:
        """Another alias in the client's configuration."""
        text = self.config.read_text() + f"\nHost {name}\n"
        self.config.write_text(text + "".join(f"  {key} {value}\n" for key, value in settings.items()))


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    program = shutil.which("sshd") or "/usr/sbin/sshd"
    if not Path(program).exists():
        if os.environ.get("CI"):
            pytest.fail("no sshd: apt-get install openssh-server")
        pytest.skip("no sshd on this machine")
    folder = tmp_path / "sshd"
    folder.mkdir(mode=0o700)
    home = tmp_path / "home"
    home.mkdir()
    for name in ("host", "id"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/authorized\nPermitUserEnvironment yes\nPasswordAuthentication no\n"
        "PermitRootLogin prohibit-password\nMaxStartups 100\n"
    )
    known = (folder / "host.pub").read_text().split()[:2]
    (folder / "known").write_text(f"[127.0.0.1]:{port} {' '.join(known)}\n")
    config = folder / "config"
    user = pwd.getpwuid(os.getuid()).pw_name
    config.write_text(
        f"Host *\n  Port {port}\n  User {user}\n  HostName 127.0.0.1\n"
        f"  IdentityFile {folder}/id\n  IdentitiesOnly yes\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd wants to separate its privileges
    process = subprocess.Popen(
        [program, "-D", "-e", "-f", folder / "sshd_config"], stderr=(folder / "log").open("wb")
    )
    box = Sshd(process, port, folder, config, home)
    box.host("box", UserKnownHostsFile=f"{folder}/known", StrictHostKeyChecking="yes")
    box.environment()
    until_s = time.monotonic() + 30.0
    while not any(one.port == port for one in read_listeners()):
        assert process.poll() is None and time.monotonic() < until_s, (folder / "log").read_text()
        time.sleep(0.02)
    yield box
    process.kill()
    process.wait()
