"""Keep the ledger true: its ceiling at what the system has left for us, its entries at what is really in use.

Owns the last memory reading and the pressure that follows from it. What is reserved for whom is the `ledger`'s, what
pressure means is `execution.pressure`'s, what is done about a worker that has outgrown its reservation `execution`'s.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.errors import mib
from edgeinfer.execution.ledger import OURSELVES, OUTGROWN, MemoryLedger, Reservation, budget_bytes
from edgeinfer.execution.pressure import CALM, PressureState, step
from edgeinfer.sensors.memory import MemoryReader, MemoryReading
from edgeinfer.sensors.pressure import PressureMeter, PressureSample

_log = logging.getLogger(__name__)

USUAL_OWN_BYTES = 45 << 20
"""What daemon and zygote take together at rest, for whom it matters before there are any ([measured] 44 to 50 MiB)."""
_REREAD_NS = NS_PER_S
"""Reading smaps of large workers costs milliseconds: not more often than this."""
_GRAIN_BYTES = 1 << 20
"""What we take ourselves is charged in whole ones of this."""
_SPARE_BYTES = 2 << 20
_SPARE_NS = 10 * NS_PER_S
"""More than this has to be free for so long before it is given back: a garbage collection is no reason to."""


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
        self._meter = PressureMeter()
        self.sample = PressureSample()
        """How hard the kernel had to work for memory before the last reading."""
        self.peak_own_bytes = 0
        """The most that was ever seen in use, by the same definition as the budget: anonymous memory and slots."""

    def reading(self) -> MemoryReading:
        """Return a reading that is at most a second old."""
        now_ns = self._clock.now_ns()
        if self._reading is None or now_ns - self._read_ns >= _REREAD_NS:
            self._reading = self._reader.read([os.getpid(), *self._pids()])
            self._read_ns = now_ns
            self.sample = self._meter.sample(self._reading.faults, now_ns)
            self.peak_own_bytes = max(self.peak_own_bytes, self._reading.own.held_bytes)
        return self._reading

    def ceiling(self) -> int:
        """Return what we may take now, in bytes, as far as free memory says."""
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

    def why_lowered(self) -> str:
        """Return why that is less than was configured: what binds us, with its numbers; empty when nothing does."""
        reading = self.reading()
        own_bytes, kept_bytes = reading.own.held_bytes, self._reserve_bytes
        bounds: list[tuple[int, str]] = [(self._ceiling_bytes, "")]
        if reading.available_bytes is not None:
            text = f"the machine has {mib(reading.available_bytes)} left"
            bounds.append((reading.available_bytes + own_bytes - kept_bytes, text))
            for limit in reading.limits:
                if limit.limit_bytes is not None:
                    usage_bytes = limit.usage_bytes or 0
                    text = f"the control group {limit.group} has {mib(usage_bytes)} of {mib(limit.limit_bytes)} in use"
                    bounds.append((limit.limit_bytes - usage_bytes + own_bytes - kept_bytes, text))
        _, text = min(bounds, key=lambda bound: bound[0])
        ours = f"{mib(own_bytes)} is in use by edgeinfer and its models, {mib(kept_bytes)} stays free (memory.reserve)"
        return f"{text}; {ours}" if text else ""


class MemoryWatch:
    """Looks once a second at what is in use, and makes the ledger say so. Loop thread only."""

    def __init__(
        self,
        budget: MemoryBudget,
        ledger: MemoryLedger,
        *,
        zygote: Callable[[], int | None],
        outgrown: Callable[[Mapping[int, int]], int],
        clock: Clock,
    ) -> None:
        """`zygote` tells its process id.

        `outgrown` does something about workers that take more than was reserved, from the memory that each process has
        for itself, and tells how much that is.
        """
        self.pressure: PressureState = CALM
        """What is in force."""
        self._budget = budget
        self._ledger = ledger
        self._zygote = zygote
        self._outgrown = outgrown
        self._clock = clock
        self._seen: MemoryReading | None = None
        self._ours = ledger.reserve(OURSELVES, 0, standing=True)
        self._beyond = ledger.reserve(OUTGROWN, 0)
        self._spare_since_ns: int | None = None
        self._elsewhere: list[tuple[Reservation, Callable[[], int]]] = []

    def charged_elsewhere(self, reservation: Reservation, in_use: Callable[[], int]) -> None:
        """What the daemon takes of this reservation, as `in_use` tells, is not charged to it once more."""
        self._elsewhere.append((reservation, in_use))

    @property
    def own_bytes(self) -> int:
        """What daemon and zygote take, as it was seen last."""
        return self._ours.size_bytes

    def step(self) -> int:
        """Bring the ledger up to date, at most once a second; return its ceiling."""
        reading = self._budget.reading()
        if reading is self._seen:
            return self._ledger.ceiling_bytes
        self._seen = reading
        now_ns = self._clock.now_ns()
        workers = {pid: memory.private_bytes for pid, memory in reading.processes.items() if pid not in self._core()}
        elsewhere_bytes = sum(min(in_use(), reservation.size_bytes) for reservation, in_use in self._elsewhere)
        self._follow_ourselves(reading.own.anonymous_bytes - sum(workers.values()) - elsewhere_bytes, now_ns)
        self._beyond.follow(self._outgrown(workers))
        self._judge_pressure(now_ns)
        return self._ledger.ceiling_bytes

    def _core(self) -> set[int | None]:
        return {os.getpid(), self._zygote()}

    def _follow_ourselves(self, held_bytes: int, now_ns: int) -> None:
        """Charge what daemon and zygote hold, with the pages that workers still share with the zygote.

        Growth at once, also where it doesn't fit: then somebody has to give way. Less only after a while.
        """
        whole_bytes = -(-max(0, held_bytes) // _GRAIN_BYTES) * _GRAIN_BYTES
        if whole_bytes >= self._ours.size_bytes - _SPARE_BYTES:
            self._spare_since_ns = None
            if whole_bytes > self._ours.size_bytes:
                self._ours.follow(whole_bytes)
        elif self._spare_since_ns is None:
            self._spare_since_ns = now_ns
        elif now_ns - self._spare_since_ns >= _SPARE_NS:
            self._spare_since_ns = None
            self._ours.follow(whole_bytes)

    def _judge_pressure(self, now_ns: int) -> None:
        available_bytes, was = self._budget.ceiling(), self.pressure
        reserved_bytes = self._ledger.snapshot().reserved_bytes
        now = self.pressure = step(
            was, self._budget.sample, available_bytes=available_bytes, reserved_bytes=reserved_bytes, now_ns=now_ns
        )
        ceiling_bytes = now.ceiling(available_bytes)
        self._ledger.set_ceiling(ceiling_bytes)
        if ceiling_bytes < available_bytes:
            why = now.why or "it is over, and the budget recovers"
            self._ledger.explain(f"memory pressure: {why}; {mib(available_bytes)} would be free to use")
        else:
            self._ledger.explain(self._budget.why_lowered())
        if now.level is not was.level:
            _log.warning(
                "memory pressure level=%s was=%s ceiling_bytes=%d available_bytes=%d why=%r",
                now.level.name.lower(), was.level.name.lower(), ceiling_bytes, available_bytes, now.why,
            )  # fmt: skip
