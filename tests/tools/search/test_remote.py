"""A board over a real sshd: measured there, told apart from its faults, and left as it was."""

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

from edgeinfer.errors import ConfigError, LinkError, SessionError
from edgeinfer_tools.search.remote import Address, BoardUnusable, linked, parse_address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ssh://pi@kitchen", Address("kitchen", "pi")),
        ("ssh://kitchen:2222", Address("kitchen", "", 2222)),
        (
            "ssh://pi@[fe80::1]:22/opt/edgeinfer/bin/edgeinfer",
            Address("fe80::1", "pi", 22, "/opt/edgeinfer/bin/edgeinfer"),
        ),
        ("ssh://kitchen/", Address("kitchen")),
    ],
)
def test_an_address_is_read(text: str, expected: Address) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "pi@kitchen",
        "http://kitchen",
        "ssh://",
        "ssh://kitchen:pi",
        "ssh://pi:secret@kitchen",
        "ssh://-oProxy=x",
        "ssh://k?x",
    ],
)
def test_what_is_no_address_is_refused_and_no_password_repeated(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(text)
    assert "secret" not in str(caught.value)


SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
EDGEINFER = Path(sys.executable).with_name("edgeinfer")


@dataclass(frozen=True)
class Board:
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


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
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
        yield Board(port, config, temporary)
    finally:
        server.terminate()
        server.wait(10)


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Path]:
    """A stand-in for an edgeinfer on the board."""
    path = tmp_path / "edgeinfer"
    path.touch(mode=0o755)
    return path


pytest_real = [pytest.mark.system, pytest.mark.slow]


class TestOverARealSshd:
    pytestmark = pytest_real

    def test_the_board_is_held_and_left_as_it_was(self, board: Board) -> None:
        with linked(board.address(), config=board.config) as there:
            assert there.version
            assert board.left_there() == [Path(there.folder).name]
        assert board.left_there() == []

    def test_a_link_that_is_cut_leaves_nothing_either(self, board: Board, tmp_path: Path) -> None:
        """Also when we are killed: the board's own shell sees the end of its input."""
        script = (
            "import sys, time\nfrom pathlib import Path\nfrom edgeinfer_tools.search.remote import *\n"
            f"with linked(parse_address('ssh://127.0.0.1:{board.port}{EDGEINFER}'), config=Path({str(board.config)!r})):\n"
            "    print('linked', flush=True)\n    time.sleep(60)\n"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        killed = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"linked\n"
        assert board.left_there()
        killed.kill()
        killed.wait()
        killed.stdout.close()
        until = time.monotonic() + 10
        while board.left_there() and time.monotonic() < until:
            time.sleep(0.05)
        assert board.left_there() == []

    def test_nobody_at_the_port(self, board: Board) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = Address("127.0.0.1", "", free.getsockname()[1])
            with pytest.raises(LinkError, match=r"ssh://127\.0\.0\.1:\d+ cannot be reached: .*[Cc]onnection refused"):
                with linked(address, config=board.config):
                    pass

    def test_a_key_that_the_board_does_not_know(self, board: Board, tmp_path: Path) -> None:
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True, timeout=20
        )
        config = tmp_path / "config"
        text = board.config.read_text()
        config.write_text(text.replace(str(board.config.with_name("user")), str(tmp_path / "other")))
        with pytest.raises(LinkError, match=r"cannot be reached: .*Permission denied"):
            with linked(board.address(), config=config):
                pass

    def test_no_edgeinfer_there(self, board: Board) -> None:
        with (
            pytest.raises(
                BoardUnusable, match=r"no edgeinfer there \(/nowhere/edgeinfer: .*; install it, or name its path"
            ),
            linked(board.address("/nowhere/edgeinfer"), config=board.config),
        ):
            pass
        assert board.left_there() == []

    def test_an_older_edgeinfer_there(self, board: Board, program: Path) -> None:
        program.write_text(
            '#!/bin/sh\ntest "$1" = --version && echo edgeinfer 0.0.9 && exit 0\n'
            "echo \"edgeinfer: error: argument COMMAND: invalid choice: 'measure'\" >&2; exit 2\n"
        )
        with pytest.raises(BoardUnusable, match=r"edgeinfer 0\.0\.9 there has no `measure`; update it"):
            with linked(board.address(str(program)), config=board.config):
                pass

    def test_another_dialect_there(self, board: Board, program: Path, tmp_path: Path) -> None:
        program.write_text('#!/bin/sh\ntest "$1" = --version && echo edgeinfer 9.0.0 || echo \'{"schema": 7}\'\n')
        (tmp_path / "candidate.tar").write_bytes(b"x")
        with linked(board.address(str(program)), config=board.config) as there:
            with pytest.raises(BoardUnusable, match=r"edgeinfer 9\.0\.0 there speaks another dialect"):
                there.measure(tmp_path / "candidate.tar", threads=[1], seconds=0.1)

    def test_a_candidate_that_the_board_refuses_is_no_fault_of_the_link(self, board: Board, tmp_path: Path) -> None:
        (tmp_path / "candidate.tar").write_bytes(b"no archive")
        with linked(board.address(), config=board.config) as there:
            with pytest.raises(SessionError, match=r"ssh://.*: .*candidate\.tar"):
                there.measure(tmp_path / "candidate.tar", threads=[1], seconds=0.1)
            assert list((Path(there.folder)).iterdir()) == []
        assert board.left_there() == []
