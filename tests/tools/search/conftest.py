"""A local sshd that plays a board."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgeinfer_tools.search.remote import Address

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
EDGEINFER = Path(sys.executable).with_name("edgeinfer")


@dataclass(frozen=True)
class SshBoard:
    """A local sshd that plays a board."""

    port: int
    config: Path
    """For ssh."""
    temporary: Path
    """The board's temporary folder."""

    def address(self, program: str = str(EDGEINFER)) -> Address:
        return Address("127.0.0.1", getpass.getuser(), self.port, program)

    def left_there(self) -> list[str]:
        return sorted(path.name for path in self.temporary.iterdir())


@pytest.fixture(scope="session")
def ssh_board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshBoard]:
    missing = [name for name in ("ssh", "scp", "ssh-keygen") if shutil.which(name) is None]
    if SSHD is None or missing:
        pytest.skip(f"needs an ssh server and client: {', '.join(['sshd'] * (SSHD is None) + missing)} not installed")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    folder = tmp_path_factory.mktemp("sshd")
    temporary = folder / "tmp"
    temporary.mkdir()
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True, timeout=20
        )
    shutil.copy(folder / "user.pub", folder / "authorized")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder / 'host'}\nAuthorizedKeysFile {folder / 'authorized'}\n"
        f"PidFile none\nStrictModes no\nPasswordAuthentication no\nUsePAM no\nSubsystem sftp internal-sftp\n"
        f"SetEnv TMPDIR={temporary}\nPermitRootLogin yes\n"
    )
    host_key = (folder / "host.pub").read_text()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {host_key}")
    config = folder / "ssh_config"
    config.write_text(
        f"Host *\n  IdentityFile {folder / 'user'}\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder / 'known'}\n"
        "  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n"
    )
    server = subprocess.Popen(
        [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")],
        stderr=(folder / "log").open("wb"),
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > until:
                    pytest.skip(f"sshd does not start here: {(folder / 'log').read_text()[-300:]}")
                time.sleep(0.05)
        yield SshBoard(port, config, temporary)
    finally:
        server.terminate()
        server.wait(10)
