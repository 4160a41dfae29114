"""Blocking work off the loop: in order, and never in the way of the process's end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from edgeinfer.clock import MonotonicClock
from edgeinfer.daemon import one_thread
from edgeinfer.daemon.one_thread import STUCK_NS, OneThread
from edgeinfer.pipeline.off_thread import off_thread


class FakeClock:
    def __init__(self) -> None:
        self.at_ns = 0

    def now_ns(self) -> int:
        return self.at_ns


async def test_jobs_run_one_after_the_other_in_a_thread_of_that_name() -> None:
    thread, order = OneThread("media", clock=MonotonicClock()), list[tuple[int, str]]()

    def job(number: int) -> None:
        order.append((number, threading.current_thread().name))

    await asyncio.gather(*(off_thread(thread, job, number) for number in range(5)))
    assert order == [(number, "media") for number in range(5)]
    with pytest.raises(FileNotFoundError):
        await off_thread(thread, os.stat, "/nonexistent")
    assert await thread.rest(1)
    assert await thread.rest(1), "again: nothing to do"


async def test_a_job_that_takes_far_too_long_is_told_and_given_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    clock = FakeClock()
    thread = OneThread("storage", clock=clock)
    stuck = asyncio.create_task(off_thread(thread, (tmp_path / "fifo").read_bytes))
    await asyncio.sleep(0.05)
    told = [thread.is_stuck]
    clock.at_ns += STUCK_NS
    assert [*told, thread.is_stuck] == [False, True]
    assert not await thread.rest(0.05)
    stuck.cancel()
    await asyncio.wait([stuck])
    (tmp_path / "fifo").write_bytes(b"")  # let it go


async def test_no_more_than_so_many_wait_for_a_stuck_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_thread, "_MOST_WAITING", 2)
    thread, go_on = OneThread("storage", clock=MonotonicClock()), threading.Event()
    first = thread.submit(go_on.wait)
    await asyncio.sleep(0.05)
    others = [thread.submit(int) for _ in range(3)]
    assert "stuck" in str(others[2].exception(0))
    go_on.set()
    assert [first.result(1), others[0].result(1), others[1].result(1)] == [True, 0, 0]
    assert await thread.rest(1)


SCRIPT = """
import asyncio, os, signal, sys
from edgeinfer.clock import MonotonicClock
from edgeinfer.daemon.lifecycle import run_until_signal
from edgeinfer.daemon.one_thread import OneThread
async def serve(stop):
    thread = OneThread("media", clock=MonotonicClock())
    job = asyncio.get_running_loop().run_in_executor(thread, open, sys.argv[1])
    print("up", flush=True)
    await stop.wait()
    assert not await thread.rest(0.1)
    job.cancel()
sys.exit(run_until_signal(serve))
"""


@pytest.mark.system
def test_a_process_whose_thread_is_stuck_ends_when_it_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with subprocess.Popen([sys.executable, "-c", SCRIPT, tmp_path / "fifo"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.terminate()
        try:
            assert process.wait(5) == 0
        finally:
            process.kill()
