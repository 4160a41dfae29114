"""Command sources with real children."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Literal

import pytest

from edgeinfer.clock import MonotonicClock
from edgeinfer.config import CommandSource
from edgeinfer.pipeline import child as kept
from edgeinfer.pipeline.child import LONGEST_WAIT_NS, wait_before_restart_ns
from edgeinfer.pipeline.command import CommandFrames

WRITER = """
import struct, sys, time
out = sys.stdout.buffer
def frame(data): out.write(struct.pack("<I", len(data)) + data); out.flush()
"""


def _python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", WRITER + code, *arguments]


@contextlib.asynccontextmanager
async def _running(section: CommandSource) -> AsyncIterator[CommandFrames]:
    source = CommandFrames(section, name="cam", clock=MonotonicClock(), dice=random.Random(1))
    task = asyncio.create_task(source.run())
    try:
        yield source
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
async def test_gives_the_newest_frame_of_a_child() -> None:
    section = CommandSource(
        _python("frame(b'one'); frame(b'two'); frame(b'three'); time.sleep(60)"), content_type="a/b"
    )
    async with _running(section) as source:
        await _eventually(lambda: source.snapshot().skipped == 2)
        frame = await asyncio.wait_for(source.next_frame(), 5)
        assert frame
        assert (frame.data, frame.content_type, frame.name) == (b"three", "a/b", "#3")
        assert abs(frame.captured_ns - time.monotonic_ns()) < 5_000_000_000


@pytest.mark.slow
async def test_a_child_that_ends_is_started_again_and_its_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "FIRST_WAIT_NS", 10_000_000)
    async with _running(CommandSource(_python("frame(b'x'); sys.exit(3)"))) as source:
        for _ in range(3):
            frame = await asyncio.wait_for(source.next_frame(), 10)
            assert frame
            assert frame.sequence_start
        await _eventually(lambda: source.snapshot().restarts >= 3)
        assert source.snapshot().problem.endswith("exited with code 3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["/no/such/program"], "/no/such/program cannot be started: No such file"),
        (_python("out.write(b'\\xff' * 100); out.flush(); time.sleep(60)"), "a frame announces 4096 MiB"),
        (_python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"), "killed by SIGSEGV"),
        (_python("import os; os.close(1); time.sleep(60)"), "killed by SIGTERM"),
    ],
    ids=["missing", "nonsense", "crash", "silent"],
)
async def test_says_what_is_wrong_with_a_child(argv: list[str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "GRACE_S", 0.3)
    async with _running(CommandSource(argv)) as source:
        await _eventually(lambda: source.snapshot().problem)
        assert text in source.snapshot().problem


@pytest.mark.slow
async def test_a_child_ends_with_its_source_with_all_that_it_started(tmp_path: Path) -> None:
    script = f"cat /dev/zero | sleep 300 & echo $! > {tmp_path}/pid; trap '' TERM; while :; do echo x; sleep 0.1; done"
    async with _running(CommandSource(["sh", "-c", script], framing="lines")) as source:
        assert await asyncio.wait_for(source.next_frame(), 10)
        await _eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
        grandchild = int((tmp_path / "pid").read_text())
        assert _alive(grandchild)
    await _eventually(lambda: not _alive(grandchild))


DAEMON = """
import asyncio, sys
from edgeinfer.clock import MonotonicClock
from edgeinfer.config import CommandSource
from edgeinfer.pipeline.command import CommandFrames
async def main():
    source = CommandFrames(CommandSource(["sh", "-c", "echo $$; exec sleep 300"], framing="lines"), name="c",
                           clock=MonotonicClock())
    task = asyncio.create_task(source.run())
    print((await source.next_frame()).data.decode(), flush=True)
    await task
asyncio.run(main())
"""


@pytest.mark.slow
def test_a_child_dies_with_a_daemon_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", DAEMON], stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout
        child = int(daemon.stdout.readline())
        assert _alive(child)
        daemon.send_signal(signal.SIGKILL)
    give_up = time.monotonic() + 5
    while _alive(child) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not _alive(child)


@pytest.mark.slow
async def test_a_chatty_child_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    code = "sys.stderr.write(('e' * 5000 + '\\n') * 1000); sys.stderr.flush(); frame(b'x'); time.sleep(60)"
    async with _running(CommandSource(_python(code))) as source:
        assert await asyncio.wait_for(source.next_frame(), 10)
        await asyncio.sleep(0.1)
    said = [record for record in caplog.records if "source says" in record.getMessage()]
    assert 0 < len(said) <= 10
    assert all(len(record.getMessage()) < 400 for record in said)


@pytest.mark.slow
async def test_leaves_neither_descriptors_nor_zombies_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "FIRST_WAIT_NS", 1_000_000)
    monkeypatch.setattr(kept, "LONGEST_WAIT_NS", 1_000_000)
    async with _running(CommandSource(["true"])) as source:
        await _eventually(lambda: source.snapshot().restarts >= 3)
        before = len(list(Path("/proc/self/fd").iterdir()))
        await _eventually(lambda: source.snapshot().restarts >= 15)
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4


def test_the_waits_between_restarts_grow_are_jittered_and_capped() -> None:
    dice = random.Random(7)
    waits = [[wait_before_restart_ns(failures, dice) for _ in range(200)] for failures in range(1, 40)]
    for row, full_ms in zip(waits, [500, 1000, 2000, 4000, 8000, 16000, *[30000] * 33], strict=True):
        assert full_ms * 0.5 <= min(row) / 1e6 < full_ms * 0.6
        assert full_ms * 0.9 < max(row) / 1e6 <= full_ms
    assert max(map(max, waits)) <= LONGEST_WAIT_NS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "framing", "frame_bytes"),
    [(["cat", "/dev/zero"], "fixed", 1), (["cat", "/dev/zero"], "length", 0), (["yes", ""], "lines", 0)],
)
async def test_a_child_that_floods_us_leaves_the_loop_to_others_and_is_told(
    argv: list[str], framing: Literal["fixed", "length", "lines"], frame_bytes: int
) -> None:
    section = CommandSource(argv, framing=framing, frame_bytes=frame_bytes)
    async with _running(section) as source:
        await _eventually(lambda: "writes faster than its frames can be taken" in source.snapshot().problem)
        worked = time.process_time()
        began = time.monotonic()
        latest = 0.0
        while (now := time.monotonic()) < began + 2:
            await asyncio.sleep(0.005)
            latest = max(latest, time.monotonic() - now - 0.005)
        assert time.process_time() - worked < 1.0, "of 2 s, a fifth, and what the measuring takes"
        assert latest < 0.2
        assert "held back" in source.snapshot().problem


@pytest.mark.slow
async def test_a_source_of_large_frames_is_not_held_back() -> None:
    code = "import itertools\nfor i in itertools.count(): out.write(bytes(1 << 20)); out.flush(); time.sleep(0.03)"
    async with _running(CommandSource(_python(code), framing="fixed", frame_bytes=1 << 20)) as source:
        for _ in range(20):
            assert await source.next_frame() is not None
        assert source.snapshot().problem == ""
