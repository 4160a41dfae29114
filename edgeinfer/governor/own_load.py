"""Tell which share of the whole machine's CPU time our own processes use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from edgeinfer.clock import Clock
from edgeinfer.sensors.process import process_time


class OwnLoad:
    """Sums the CPU time of this process, of `pids`, and of those they have waited for. Loop thread only.

    One small file for each process, in steps of a clock tick (10 ms). A process that ends between two looks moves its
    time to who waited for it: nothing is lost or counted twice.
    """

    def __init__(self, pids: Callable[[], Iterable[int]], *, clock: Clock, proc_root: Path = Path("/proc")) -> None:
        self._pids = pids
        self._clock = clock
        self._proc_root = proc_root
        self._last: tuple[int, int] | None = None

    def share(self) -> float | None:
        """Return the share of all online CPUs since the last call, 0 to 1; None at the first, or when unknown."""
        times = [process_time(self._proc_root, pid) for pid in (os.getpid(), *self._pids())]
        if times[0] is None:
            self._last = None
            return None
        now = self._clock.now_ns(), sum(item.cpu_ns + item.reaped_ns for item in times if item is not None)
        last, self._last = self._last, now
        if last is None or now[0] <= last[0]:
            return None
        return min(1.0, max(0.0, (now[1] - last[1]) / (now[0] - last[0]) / (os.cpu_count() or 1)))
