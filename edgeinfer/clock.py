"""Give every part the same, injected, monotonic time.

`now_ns` is CLOCK_MONOTONIC in production: all processes of one machine share it, so a worker's marks
can be compared with the daemon's. Wall time only labels records and never decides anything.
Waiting is asyncio's; `sleep_until` turns an absolute deadline into a wait on the running loop, whose
clock is the same one (in tests: the virtual loop of `tests/virtual_time.py`).
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000


class Clock(Protocol):
    """The time that decisions are made by."""

    def now_ns(self) -> int:
        """Return monotonic nanoseconds."""
        ...


class MonotonicClock:
    """The machine's own monotonic clock."""

    def now_ns(self) -> int:
        """Return CLOCK_MONOTONIC in nanoseconds."""
        return time.monotonic_ns()


class LoopClock:
    """The clock of an event loop: the same as `MonotonicClock` on a real one, virtual on a test's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now_ns(self) -> int:
        """Return the loop's time in nanoseconds."""
        return round(self._loop.time() * NS_PER_S)


async def sleep_until(deadline_ns: int, clock: Clock) -> None:
    """Wait until `clock` has reached `deadline_ns`; return at once when it already has."""
    while (left_ns := deadline_ns - clock.now_ns()) > 0:
        await asyncio.sleep(left_ns / NS_PER_S)


def boot_id() -> str:
    """Return the kernel's id of this boot, or `unknown` where there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return "unknown"
