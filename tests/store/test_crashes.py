"""What is known of crashes outlives damage, a second writer and a full file; a file that can't be read knows nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.store.active import ActiveFile, Choices
from edgeinfer.store.crashes import MAX_RECORDS, CrashFile, CrashRecord, VariantKey, bounded


def record(number: int = 0, *, quarantined: bool = False, crashes: int = 1, **more: object) -> CrashRecord:
    key = VariantKey(f"{number:064x}", "fp32", "1.32.0")
    return CrashRecord(key, "echo", "1.0.0", crashes=crashes, quarantined=quarantined, **more)  # type: ignore[arg-type]


def test_what_was_written_is_read_and_the_newest_is_the_last(tmp_path: Path) -> None:
    file = CrashFile(tmp_path / "state")
    assert file.read() == ({}, "")
    first, second = record(1, detail="killed by SIGSEGV"), record(2, quarantined=True, loading="boot", proven=True)
    file.write({first.key: first})
    file.write({second.key: second})
    file.write({first.key: (first := record(1, crashes=2))})
    assert list(file.read()[0].values()) == [second, first]
    assert file.quarantined(second.key.digest) == [second]
    file.forget(second.key.digest)
    assert list(file.read()[0].values()) == [first]
    file.write({first.key: record(1, crashes=0)})
    assert file.read() == ({}, ""), "what says nothing is not kept"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "damaged (0 bytes)"),
        (bytes(4096), "damaged (4096 bytes)"),
        (b'{"schema": 1, "records": [', "damaged"),
        (b'{"schema": 1, "records": [{"key": 7}]}', "damaged"),
        (b"\xff\xfe{}", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b'{"schema": 99, "records": []}', "schema 99, this edgeinfer reads 1"),
        (b" " * (2 << 20), "more than 1048576 bytes"),
    ],
)
def test_a_file_that_cannot_be_read_knows_nothing_and_is_written_anew(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    file = CrashFile(tmp_path)
    file.path.write_bytes(content)
    records, problem = file.read()
    assert records == {}
    assert complaint in problem
    assert str(file.path) in problem
    wanted = record(3)
    file.write({wanted.key: wanted})
    assert file.read() == ({wanted.key: wanted}, "")


def test_a_folder_in_its_place_is_told(tmp_path: Path) -> None:
    file = CrashFile(tmp_path)
    file.path.mkdir()
    assert "cannot be read" in file.read()[1]
    with pytest.raises(OSError):
        file.write({record().key: record()})
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [], "nothing half written stays"


@given(st.lists(st.booleans(), max_size=2 * MAX_RECORDS))
def test_it_is_bounded_and_quarantines_go_last(kinds: list[bool]) -> None:
    records = [record(number, quarantined=kind) for number, kind in enumerate(kinds)]
    kept = bounded(records)
    assert len(kept) == min(len(records), MAX_RECORDS)
    assert [r for r in records if r in kept] == kept, "in order"
    gone = [r for r in records if r not in kept]
    if any(r.quarantined for r in gone):
        assert all(r.quarantined for r in kept)
    for kind in (True, False):  # of a kind, the oldest go
        mine = [r in kept for r in records if r.quarantined is kind]
        assert mine == sorted(mine)


@pytest.mark.parametrize("name", ["crashes.json", "active.json", "active.json.bak"])
def test_what_would_block_or_never_end_is_passed_over(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    assert [text for text in _told(tmp_path) if "it is a pipe, not a plain file" in text]
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    assert [text for text in _told(tmp_path) if "it is a symbolic link, not a plain file" in text]
    CrashFile(tmp_path).write({record().key: record()})
    ActiveFile(tmp_path).write(Choices())
    assert (CrashFile(tmp_path).path.is_symlink(), ActiveFile(tmp_path).path.is_symlink()) == (False, False)


def _told(folder: Path) -> list[str]:
    return [CrashFile(folder).read()[1], *ActiveFile(folder).read()[1]]
