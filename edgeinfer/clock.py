"""Give every part the same, injected, monotonic time.

`now_ns` is CLOCK_MONOTONIC in production: all processes of one machine share it, so a worker's marks
can be compared with the daemon's. Wall time only labels records and never decides anything.
Waiting is asyncio's; `sleep_until` and `Alarm` turn absolute deadlines into a wait on the running loop, whose
clock is the same one (in tests: the virtual loop of `tests/virtual_time.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
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
    """The machine's own monotonic clock: CLOCK_MONOTONIC."""

    now_ns = staticmethod(time.monotonic_ns)


class LoopClock:
    """The clock of an event loop: the same as `MonotonicClock` on a real one, virtual on a test's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now_ns(self) -> int:
        """Return the loop's time in nanoseconds."""
        return round(self._loop.time() * NS_PER_S)


_NEVER_NS = 1 << 63


class Alarm:
    """One timer for the many moments of one owner: calls `ring` at the first of those that were set.

    Loop thread only. Moments are not taken back: a run of a millisecond would else make and cancel a timer for a
    deadline far away. So it may ring for nothing. Whoever is rung looks at what is due, and sets the next moment.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._at_ns = _NEVER_NS
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at_ns: int) -> None:
        """Ring at `at_ns` at the latest, rounded as the loop's timers are."""
        if at_ns < self._at_ns:
            self.stop()
            self._at_ns = at_ns
            self._timer = asyncio.get_running_loop().call_at(at_ns / NS_PER_S, self._go_off)

    def stop(self) -> None:
        """Forget every moment."""
        self._at_ns = _NEVER_NS
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _go_off(self) -> None:
        self._at_ns, self._timer = _NEVER_NS, None
        self._ring()


async def sleep_until(deadline_ns: int, clock: Clock) -> None:
    """Wait until `clock` has reached `deadline_ns`; return at once when it already has."""
    while (left_ns := deadline_ns - clock.now_ns()) > 0:
        await asyncio.sleep(left_ns / NS_PER_S)
