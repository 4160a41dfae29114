"""The real program is not here; small scripts stand in for it and for every way in which it fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from edgeinfer.sensors.vcgencmd import Vcgencmd, is_raspberry
from tests.sensors.boards import raspberry_pi_4
from tests.sensors.tree import FakeTree


def stub(folder: Path, body: str) -> str:
    path = folder / "vcgencmd"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_answer_comes_as_it_was_printed(tmp_path: Path) -> None:
    assert Vcgencmd([stub(tmp_path, 'echo "throttled=0x$1"'), "50005"]).ask() == "throttled=0x50005"


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("echo 'VCHI initialization failed'; exit 255", OSError, "VCHI initialization failed"),
        ('echo "Can\'t open device file: /dev/vcio" >&2; exit 1', PermissionError, "/dev/vcio"),
        ("echo 'open: Permission denied'; exit 1", PermissionError, "Permission denied"),
        ("exit 3", OSError, "ended with 3: no words"),
        ("kill -9 $$", OSError, "ended with -9"),
    ],
)
def test_failure_is_an_error_with_its_words(tmp_path: Path, body: str, kind: type[OSError], words: str) -> None:
    with pytest.raises(OSError, match="vcgencmd ended") as caught:
        Vcgencmd([stub(tmp_path, body)]).ask()
    assert words in str(caught.value.strerror)
    assert isinstance(caught.value, PermissionError) is (kind is PermissionError)


def test_program_that_is_not_there_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not installed"):
        Vcgencmd([str(tmp_path / "vcgencmd"), "get_throttled"]).ask()


def test_program_that_hangs_is_killed_and_the_next_call_starts_a_new_one(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = Vcgencmd([stub(tmp_path, f"echo $$ >> {pids}; exec sleep 60")], timeout_s=0.1)
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"did not answer for 0\.1 s"):
            program.ask()
        time.sleep(0.05)  # the kill takes effect
    for pid in pids.read_text().split():
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or ") Z " in stat.read_text()


def test_flood_of_output_is_cut(tmp_path: Path) -> None:
    assert len(Vcgencmd([stub(tmp_path, "head -c 200000 /dev/zero | tr '\\0' x")]).ask()) == 4096


def test_board_is_a_raspberry_by_its_device_tree(tree: FakeTree) -> None:
    assert not is_raspberry(tree.proc)
    tree.write(tree.proc / "device-tree" / "compatible", "radxa,rock-5b\0")
    assert not is_raspberry(tree.proc)
    raspberry_pi_4(tree)
    assert is_raspberry(tree.proc)
