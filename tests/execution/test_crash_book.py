"""Who is blamed for what, who is proven, and what a restart knows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from edgeinfer.execution.crash_book import CrashBook, blame
from edgeinfer.execution.crashes import CrashPolicy
from edgeinfer.store.crashes import MAX_DETAIL, CrashFile, CrashRecord, VariantKey
from edgeinfer.store.store import Installed

RUNTIME = "1.32.0"
A, B = (VariantKey(letter * 64, "fp32", RUNTIME) for letter in "ab")
BUNDLE = Installed(Path("/"), cast("Any", SimpleNamespace(name="echo", version="1.0.0")), A.digest, active=True)


@pytest.fixture
def storage() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as storage:
        yield storage


@pytest.fixture
def book_of(tmp_path: Path, storage: ThreadPoolExecutor) -> Callable[..., CrashBook]:
    return lambda boot="one": CrashBook(CrashFile(tmp_path), storage, boot=boot)


async def written(storage: ThreadPoolExecutor) -> None:
    """Return when the writes so far are on disk and seen."""
    await asyncio.get_running_loop().run_in_executor(storage, lambda: None)
    await asyncio.sleep(0)


def known(key: VariantKey = A, **more: Any) -> CrashRecord:
    return CrashRecord(key, "echo", "1.0.0", **more)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([known(loading="one")], [known(crashes=1)]),
        ([known(loading="one", crashes=1)], [known(crashes=2)]),
        ([known(loading="one", crashes=2)], [known(crashes=3, quarantined=True)]),
        ([known(loading="another", crashes=2)], [known(crashes=2)]),  # a power cut
        ([known(loading="another")], []),
        ([known(A, loading="one"), known(B, loading="one")], [known(B, crashes=1)]),  # the last one is blamed
        ([known(proven=True)], [known(proven=True)]),
        ([known(quarantined=True, crashes=3)], [known(quarantined=True, crashes=3)]),
    ],
)
def test_who_is_blamed_when_the_service_itself_has_ended(before: list[CrashRecord], after: list[CrashRecord]) -> None:
    judged = blame({record.key: record for record in before}, "one", CrashPolicy(max_crashes=3))
    assert [replace(record, detail="") for record in judged.values()] == after
    had = {record.key: record.crashes for record in before}
    for record in judged.values():
        assert ("service itself" in record.detail) == (record.crashes > had[record.key])


async def test_a_service_that_dies_three_times_of_a_model_leaves_it_alone_and_remembers(
    book_of: Callable[..., CrashBook], storage: ThreadPoolExecutor
) -> None:
    for _ in range(3):
        book = book_of()
        assert book.quarantined(RUNTIME) == []
        book.begin(A, BUNDLE)
        await written(storage)
    assert [record.title for record in book_of().quarantined(RUNTIME, "echo")] == ["1.0.0 fp32"]
    await written(storage)
    later = book_of("two")
    assert [record.key for record in later.quarantined(RUNTIME)] == [A], "also after a reboot"
    assert later.quarantined("1.33.0") == [], "with another runtime it may try again"
    assert later.quarantined(RUNTIME, "other") == []
    later.lift(A.digest)
    await written(storage)
    assert book_of("two").quarantined(RUNTIME) == []


async def test_a_clean_end_or_a_power_cut_blames_nobody(
    book_of: Callable[..., CrashBook], storage: ThreadPoolExecutor
) -> None:
    for boot in ("one", "two", "three", "four"):
        book_of(boot).begin(A, BUNDLE)
        await written(storage)
    for _ in range(4):
        book = book_of("five")
        book.begin(A, BUNDLE)
        book.keep_on_trial(())
        await written(storage)
    assert book_of("five").crashes(A) == 0


async def test_the_proven_are_never_blamed_and_their_crashes_are_forgiven(
    book_of: Callable[..., CrashBook], storage: ThreadPoolExecutor
) -> None:
    book = book_of()
    book.begin(A, BUNDLE)
    book.crashed(A, BUNDLE, "x" * 10_000, crashes=2, quarantine=False)
    assert book.crashes(A) == 2
    book.prove(A, BUNDLE)
    assert book.crashes(A) == 0
    book.begin(A, BUNDLE)
    await written(storage)
    again = book_of()
    assert again.crashes(A) == 0
    again.crashed(A, BUNDLE, "y" * 10_000, crashes=3, quarantine=True)
    [record] = again.quarantined(RUNTIME)
    assert len(record.detail) == MAX_DETAIL
    again.forgive(A)
    assert again.quarantined(RUNTIME) == []


async def test_what_the_command_line_has_taken_out_stays_out(
    book_of: Callable[..., CrashBook], storage: ThreadPoolExecutor, tmp_path: Path
) -> None:
    book = book_of()
    book.crashed(A, BUNDLE, "killed", crashes=3, quarantine=True)
    await written(storage)
    CrashFile(tmp_path).forget(A.digest)
    book.crashed(B, BUNDLE, "killed", crashes=1, quarantine=False)
    await written(storage)
    assert set(CrashFile(tmp_path).read()[0]) == {B}


async def test_a_disk_that_cannot_be_written_is_told_once_and_costs_nothing_else(
    book_of: Callable[..., CrashBook],
    storage: ThreadPoolExecutor,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    book = book_of()
    (tmp_path / "crashes.lock").mkdir()
    for crashes in (1, 2, 3):
        book.crashed(A, BUNDLE, "killed", crashes=crashes, quarantine=crashes == 3)
        await written(storage)
    assert book.degraded
    assert [record.key for record in book.quarantined(RUNTIME)] == [A], "as long as the service runs"
    assert sum("cannot be written" in line for line in caplog.messages) == 1
    (tmp_path / "crashes.lock").rmdir()
    book.prove(A, BUNDLE)
    await written(storage)
    assert not book.degraded
