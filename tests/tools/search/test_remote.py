"""A board over a real sshd: measured there, told apart from its faults, and left as it was."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgeinfer.errors import ConfigError, LinkError, SessionError
from edgeinfer_tools.search.remote import Address, BoardUnusable, linked, parse_address
from tests.tools.search.conftest import EDGEINFER, SshBoard


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


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A stand-in for an edgeinfer on the board."""
    path = tmp_path / "edgeinfer"
    path.touch(mode=0o755)
    return path


pytest_real = [pytest.mark.system, pytest.mark.slow]


class TestOverARealSshd:
    pytestmark = pytest_real

    def test_the_board_is_held_and_left_as_it_was(self, ssh_board: SshBoard) -> None:
        with linked(ssh_board.address(), config=ssh_board.config) as there:
            assert there.version
            assert ssh_board.left_there() == [Path(there.folder).name]
        assert ssh_board.left_there() == []

    def test_a_link_that_is_cut_leaves_nothing_either(self, ssh_board: SshBoard, tmp_path: Path) -> None:
        """Also when we are killed: the board's own shell sees the end of its input."""
        script = (
            "import sys, time\nfrom pathlib import Path\nfrom edgeinfer_tools.search.remote import *\n"
            f"with linked(parse_address('ssh://127.0.0.1:{ssh_board.port}{EDGEINFER}'), config=Path({str(ssh_board.config)!r})):\n"
            "    print('linked', flush=True)\n    time.sleep(60)\n"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        killed = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"linked\n"
        assert ssh_board.left_there()
        killed.kill()
        killed.wait()
        killed.stdout.close()
        until = time.monotonic() + 10
        while ssh_board.left_there() and time.monotonic() < until:
            time.sleep(0.05)
        assert ssh_board.left_there() == []

    def test_nobody_at_the_port(self, ssh_board: SshBoard) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = Address("127.0.0.1", "", free.getsockname()[1])
            with (
                pytest.raises(LinkError, match=r"ssh://127\.0\.0\.1:\d+ cannot be reached: .*[Cc]onnection refused"),
                linked(address, config=ssh_board.config),
            ):
                pass

    def test_a_key_that_the_board_does_not_know(self, ssh_board: SshBoard, tmp_path: Path) -> None:
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True, timeout=20
        )
        config = tmp_path / "config"
        text = ssh_board.config.read_text()
        config.write_text(text.replace(str(ssh_board.config.with_name("user")), str(tmp_path / "other")))
        with (
            pytest.raises(LinkError, match=r"cannot be reached: .*Permission denied"),
            linked(ssh_board.address(), config=config),
        ):
            pass

    def test_no_edgeinfer_there(self, ssh_board: SshBoard) -> None:
        with (
            pytest.raises(
                BoardUnusable, match=r"no edgeinfer there \(/nowhere/edgeinfer: .*; install it, or name its path"
            ),
            linked(ssh_board.address("/nowhere/edgeinfer"), config=ssh_board.config),
        ):
            pass
        assert ssh_board.left_there() == []

    def test_an_older_edgeinfer_there(self, ssh_board: SshBoard, program: Path) -> None:
        program.write_text(
            '#!/bin/sh\ntest "$1" = --version && echo edgeinfer 0.0.9 && exit 0\n'
            "echo \"edgeinfer: error: argument COMMAND: invalid choice: 'measure'\" >&2; exit 2\n"
        )
        with (
            pytest.raises(BoardUnusable, match=r"edgeinfer 0\.0\.9 there has no `measure`; update it"),
            linked(ssh_board.address(str(program)), config=ssh_board.config),
        ):
            pass

    def test_another_dialect_there(self, ssh_board: SshBoard, program: Path, tmp_path: Path) -> None:
        program.write_text('#!/bin/sh\ntest "$1" = --version && echo edgeinfer 9.0.0 || echo \'{"schema": 7}\'\n')
        (tmp_path / "candidate.tar").write_bytes(b"x")
        with (
            linked(ssh_board.address(str(program)), config=ssh_board.config) as there,
            pytest.raises(BoardUnusable, match=r"edgeinfer 9\.0\.0 there speaks another dialect"),
        ):
            there.measure(tmp_path / "candidate.tar", threads=[1], seconds=0.1)

    def test_a_candidate_that_the_board_refuses_is_no_fault_of_the_link(
        self, ssh_board: SshBoard, tmp_path: Path
    ) -> None:
        (tmp_path / "candidate.tar").write_bytes(b"no archive")
        with linked(ssh_board.address(), config=ssh_board.config) as there:
            with pytest.raises(SessionError, match=r"ssh://.*: .*candidate\.tar"):
                there.measure(tmp_path / "candidate.tar", threads=[1], seconds=0.1)
            assert list((Path(there.folder)).iterdir()) == []
        assert ssh_board.left_there() == []
