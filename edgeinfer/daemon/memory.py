"""Keep the ledger's ceiling at what the system really has left for us.

Owns the last memory reading. What is reserved is the `ledger`'s; this only says how much may be.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.execution.ledger import budget_bytes
from edgeinfer.sensors.memory import MemoryReader, MemoryReading

_REREAD_NS = NS_PER_S
"""Reading smaps of large workers costs milliseconds: not more often than this."""


class MemoryBudget:
    """The bytes that daemon, zygote and workers may take together. Loop thread only."""

    def __init__(
        self,
        *,
        ceiling_bytes: int,
        reserve_bytes: int,
        proc_root: Path,
        sys_root: Path,
        pids: Callable[[], Iterable[int]],
        clock: Clock,
    ) -> None:
        """`pids` tells our zygote and workers; the daemon itself is always counted."""
        self._ceiling_bytes = ceiling_bytes
        self._reserve_bytes = reserve_bytes
        self._reader = MemoryReader(proc_root, sys_root, clock=clock)
        self._pids = pids
        self._clock = clock
        self._read_ns = 0
        self._reading: MemoryReading | None = None
        self.peak_own_bytes = 0
        """The most that was ever seen in use, by the same definition as the budget: anonymous memory and slots."""

    def reading(self) -> MemoryReading:
        """Return a reading that is at most a second old."""
        now_ns = self._clock.now_ns()
        if self._reading is None or now_ns - self._read_ns >= _REREAD_NS:
            self._reading = self._reader.read([os.getpid(), *self._pids()])
            self._read_ns = now_ns
            self.peak_own_bytes = max(self.peak_own_bytes, self._reading.own.held_bytes)
        return self._reading

    def ceiling(self) -> int:
        """Return the ceiling as it should be now, in bytes."""
        reading = self.reading()
        if reading.available_bytes is None:  # told by the reader; the configured ceiling is all there is to go by
            return self._ceiling_bytes
        return budget_bytes(
            configured_ceiling=self._ceiling_bytes,
            own_bytes=reading.own.held_bytes,
            available_bytes=reading.available_bytes,
            cgroup_headrooms=reading.headrooms,
            reserve=self._reserve_bytes,
        )
