from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from edgeinfer.config import DirectorySource
from edgeinfer.pipeline.directory import DirectoryFrames
from edgeinfer.pipeline.frame import MAX_FRAME_BYTES, SourceError
from tests.pipeline.staging import Inline, loop_clock
from tests.virtual_time import run_virtual


def _run(section: DirectorySource, act: Callable[[DirectoryFrames], Awaitable[None]]) -> None:
    async def main() -> None:
        await act(DirectoryFrames(section, clock=loop_clock(), storage=Inline()))

    run_virtual(main())


def test_replays_in_order_of_name_over_and_over(tmp_path: Path) -> None:
    for name in ("b.png", "a.jpg", "c.txt", ".hidden.jpg", "d.jpg.part"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "folder.jpg").mkdir()

    async def act(source: DirectoryFrames) -> None:
        frames = [await source.next_frame() for _ in range(6)]
        assert [frame and frame.name for frame in frames] == ["a.jpg", "b.png", "c.txt"] * 2
        assert [frame and frame.content_type for frame in frames[:3]] == ["image/jpeg", "image/png", "text/plain"]
        assert [frame and frame.sequence_start for frame in frames] == [True, False, False] * 2
        assert frames[0]
        assert frames[0].data == b"a.jpg"
        assert frames[0].captured_ns == loop_clock().now_ns()

    _run(DirectorySource(tmp_path), act)


def test_once_ends_and_a_pattern_chooses(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.jpg", "c.png"):
        (tmp_path / name).write_bytes(b"x")

    async def act(source: DirectoryFrames) -> None:
        names = []
        while (frame := await source.next_frame()) is not None:
            names.append(frame.name)
        assert names == ["a.jpg", "b.jpg"]
        assert await source.next_frame() is None

    _run(DirectorySource(tmp_path, pattern="*.jpg", mode="once"), act)


def test_a_file_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"x")
    (tmp_path / "b.jpg").write_bytes(b"x")
    os.truncate(tmp_path / "b.jpg", MAX_FRAME_BYTES + 1)

    async def act(source: DirectoryFrames) -> None:
        names = [frame.name for _ in range(3) if (frame := await source.next_frame())]
        assert names == ["a.jpg", "a.jpg", "a.jpg"]
        assert source.snapshot().skipped == 2
        (tmp_path / "a.jpg").unlink()
        with pytest.raises(SourceError, match=r"b\.jpg has more than 32 MiB"):
            await source.next_frame()

    _run(DirectorySource(tmp_path), act)


@pytest.mark.parametrize("mode", ["replay", "once", "watch"])
def test_a_missing_directory_is_told_and_found_when_it_comes(tmp_path: Path, mode: str) -> None:
    async def act(source: DirectoryFrames) -> None:
        with pytest.raises(SourceError, match=r"later cannot be listed: No such file"):
            await source.next_frame()
        assert "later" in source.snapshot().problem
        (tmp_path / "later").mkdir()
        if mode != "watch":
            with pytest.raises(SourceError, match=r"no file that matches '\*'"):
                await source.next_frame()
            (tmp_path / "later/a.jpg").write_bytes(b"x")
            frame = await source.next_frame()
            assert frame
            assert source.snapshot().problem == ""

    _run(DirectorySource(tmp_path / "later", mode=mode), act)


def test_watches_for_new_files_and_takes_the_newest(tmp_path: Path) -> None:
    (tmp_path / "old.jpg").write_bytes(b"old")

    def write(name: str, mtime_s: int, data: bytes = b"new") -> None:
        (tmp_path / name).write_bytes(data)
        os.utime(tmp_path / name, (mtime_s, mtime_s))

    async def act(source: DirectoryFrames) -> None:
        waiting = asyncio.create_task(source.next_frame())
        await asyncio.sleep(1)
        assert not waiting.done()
        came_ns = loop_clock().now_ns()
        write("b.jpg", 2000)
        write("a.jpg", 3000)
        write("c.jpg", 1000)
        frame = await asyncio.wait_for(waiting, 1)
        assert frame
        assert frame.name == "a.jpg"
        assert 0 <= frame.captured_ns - came_ns <= 100_000_000
        assert source.snapshot().skipped == 2
        write("a.jpg", 4000, b"written again")
        frame = await asyncio.wait_for(source.next_frame(), 1)
        assert frame
        assert frame.data == b"written again"

    _run(DirectorySource(tmp_path, mode="watch"), act)


def test_a_file_that_is_still_growing_is_left_alone(tmp_path: Path) -> None:
    async def act(source: DirectoryFrames) -> None:
        waiting = asyncio.create_task(source.next_frame())
        await asyncio.sleep(0.35)
        for size in range(1, 11):
            (tmp_path / "a.jpg").write_bytes(b"x" * size)
            os.utime(tmp_path / "a.jpg", (size, size))
            await asyncio.sleep(0.1)
            assert not waiting.done()
        frame = await asyncio.wait_for(waiting, 1)
        assert frame
        assert len(frame.data) == 10

    _run(DirectorySource(tmp_path, mode="watch"), act)
