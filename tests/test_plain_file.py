"""Whatever lies at a path, reading it ends: with its bytes, or with a reason."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from edgeinfer.plain_file import open_plain, read_plain


@pytest.mark.parametrize("size", [0, 1, 99, 100])
def test_a_plain_file_is_read_to_its_end(size: int, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * size)
    assert read_plain(tmp_path / "a", 100) == b"x" * size
    (tmp_path / "link").symlink_to("a")
    assert read_plain(tmp_path / "link", 100) == b"x" * size


def test_files_that_say_they_are_empty_are_read_all_the_same() -> None:
    assert read_plain(Path("/proc/self/status"), 1 << 16).startswith(b"Name:")


def test_a_longer_one_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="it has more than 100 bytes"):
        read_plain(tmp_path / "sparse", 100)


def test_what_would_block_or_never_end_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a pipe, not a plain file"):
        read_plain(tmp_path / "pipe", 100)
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="it is a device, not a plain file"):
        read_plain(tmp_path / "zero", 100)
    with pytest.raises(IsADirectoryError):
        read_plain(tmp_path, 100)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(tmp_path / "s"))
        with pytest.raises(OSError, match="it is a socket"):
            read_plain(tmp_path / "s", 100)


def test_a_link_is_refused_where_only_we_put_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(OSError, match="it is a symbolic link"):
        read_plain(tmp_path / "link", 100, follow=False)
    assert read_plain(tmp_path / "a", 100, follow=False) == b"x"


def test_nothing_stays_open(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        with pytest.raises(OSError, match="pipe"):
            open_plain(tmp_path / "pipe")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
