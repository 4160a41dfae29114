"""The memory of commands: survives restarts and bad disks, and never grows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from edgeinfer.control.journal import MAX_ENTRIES, MAX_FILE_BYTES, Entry, Journal
from tests.control.plane_fixture import InlineStorage


def entry(command_id: str) -> Entry:
    return Entry(command_id, "load", "f", "edgeinfer/v1/lab/op/reply", b"\x00\xff")


def fill(path: Path, count: int) -> Journal:
    async def main() -> Journal:
        journal = Journal(path, InlineStorage())
        for number in range(count):
            await journal.begin(entry(f"c{number}"))
            await journal.finish(f"c{number}", b"reply")
        return journal

    return asyncio.run(main())


def test_a_restart_remembers(tmp_path: Path) -> None:
    fill(tmp_path / "journal", 2)
    journal = Journal(tmp_path / "journal", InlineStorage())
    found = journal.find("c1")
    assert found is not None
    assert (found.reply, found.correlation) == (b"reply", b"\x00\xff")
    assert journal.interrupted() == []


@pytest.mark.slow
def test_the_oldest_are_forgotten_first(tmp_path: Path) -> None:
    journal = fill(tmp_path / "journal", MAX_ENTRIES + 3)
    for memory in (journal, Journal(tmp_path / "journal", InlineStorage())):
        assert [memory.find(f"c{number}") is None for number in range(4)] == [True, True, True, False]


GARBLED = {
    "zero bytes": b"",
    "nothing but zeros": bytes(4096),
    "half": b'{"schema":1,"entries":[{"id":"c0","ve',
    "another program's": b'{"hello":1}',
    "another version's": b'{"schema":2,"entries":[]}',
    "deep": b"[" * 1_000_000,
    "huge": b'{"schema":1,"entries":[{"id":"c","verb":"load","fingerprint":"f","topic":"t","correlation":null}]}'
    + b" " * MAX_FILE_BYTES,
}


@pytest.mark.parametrize("content", GARBLED.values(), ids=GARBLED.keys())
def test_a_garbled_file_is_an_empty_memory_and_is_replaced_by_the_next_write(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    assert Journal(path, InlineStorage()).interrupted() == []
    fill(path, 1)
    assert Journal(path, InlineStorage()).find("c0") is not None


def test_a_disk_that_cannot_be_written_degrades_and_recovers(tmp_path: Path) -> None:
    async def main() -> list[bool]:
        folder = tmp_path / "gone"
        journal = Journal(folder / "journal", InlineStorage())
        await journal.begin(entry("c0"))
        states = [journal.degraded]
        assert journal.find("c0") is not None
        folder.mkdir()
        await journal.finish("c0", b"reply")
        states.append(journal.degraded)
        found = Journal(folder / "journal", InlineStorage()).find("c0")
        assert found is not None
        assert found.reply == b"reply"
        return states

    assert asyncio.run(main()) == [True, False]
