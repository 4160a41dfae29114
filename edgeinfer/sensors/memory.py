"""Tell how much memory there is, how much of it may be ours, and how much is.

The numbers for the budget of DESIGN: available memory, every control group that binds us with its usage, and our own
processes. What the budget then is, and what to do about it, is the ledger's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.clock import Clock
from edgeinfer.sensors.cgroup import LimitState, MemoryLimit, groups, memory_limit
from edgeinfer.sensors.pressure import FaultCounters, read_counters
from edgeinfer.sensors.probe import read_static
from edgeinfer.sensors.process import ProcessMemory, process_memories, together
from edgeinfer.sensors.state import ChangeLog, SensorState


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Everything the memory budget is made of."""

    total_bytes: int | None
    """Of the machine; None when /proc/meminfo can't be read."""
    available_bytes: int | None
    """What can be had without swapping, as the kernel estimates it."""
    processes: Mapping[int, ProcessMemory]
    """Of each of the processes asked about that is there, by its id."""
    limits: tuple[MemoryLimit, ...]
    """Every group that binds us, innermost first, whatever its file says."""
    faults: FaultCounters
    """What tells that memory is short although some is free."""

    @property
    def own(self) -> ProcessMemory:
        """Of all the processes asked about."""
        return together(self.processes.values())

    @property
    def headrooms(self) -> tuple[tuple[int, int], ...]:
        """(limit, usage) in bytes of every group that has a limit; usage is without droppable file cache."""
        return tuple((item.limit_bytes, item.usage_bytes or 0) for item in self.limits if item.limit_bytes is not None)


class MemoryReader:
    """Reads memory, and says once what is wrong with a limit. Loop thread only."""

    def __init__(self, proc_root: Path, sys_root: Path, *, clock: Clock) -> None:
        self._proc_root = proc_root
        self._sys_root = sys_root
        self._clock = clock
        self._changes = ChangeLog()

    def read(self, pids: Iterable[int] = ()) -> MemoryReading:
        """Return the memory as it is now; `pids` are our own processes (daemon, zygote, workers)."""
        reading = read_memory(self._proc_root, self._sys_root, pids)
        now_ns = self._clock.now_ns()
        for item in reading.limits:
            state = _SENSOR_STATES[item.state]
            if item is reading.limits[-1] and item.state is LimitState.MISSING:
                state = SensorState.OK  # the root of version 2 has no limit file
            detail = item.detail or f"memory {item.state}"
            self._changes.note(f"cgroup({item.group})", state, detail, now_ns)
        missing = reading.available_bytes is None
        state = SensorState.MISSING if missing else SensorState.OK
        detail = f"no MemAvailable in {self._proc_root / 'meminfo'}" if missing else ""
        self._changes.note("meminfo", state, detail, now_ns)
        faults = reading.faults
        judged_by = f"judged by {', '.join(faults.sources) or 'nothing: this system tells nothing of it'}"
        garbage = f"{', '.join(faults.garbage)} make no sense; {judged_by}"
        state = SensorState.ABSURD if faults.garbage else SensorState.OK
        self._changes.note("memory-pressure", state, garbage if faults.garbage else judged_by, now_ns)
        return reading


_SENSOR_STATES = {
    LimitState.LIMITED: SensorState.OK,
    LimitState.UNLIMITED: SensorState.OK,
    LimitState.MISSING: SensorState.MISSING,
    LimitState.EMPTY: SensorState.ABSURD,
    LimitState.GARBAGE: SensorState.ABSURD,
}


def read_memory(proc_root: Path, sys_root: Path, pids: Iterable[int] = ()) -> MemoryReading:
    """Return the memory as it is now, for the processes `pids`.

    Costs about 0.1 ms, and 1 ms for each 100 MiB that `pids` have mapped.
    """
    meminfo = _meminfo(read_static(proc_root / "meminfo") or "")
    ancestors = groups("memory", proc_root, sys_root)
    processes = process_memories(proc_root, pids)
    return MemoryReading(
        total_bytes=meminfo.get("MemTotal"),
        available_bytes=meminfo.get("MemAvailable"),
        processes=processes,
        limits=tuple(memory_limit(group) for group in ancestors),
        faults=read_counters(proc_root, ancestors[0] if ancestors else None, processes),
    )


def _meminfo(text: str) -> dict[str, int]:
    fields = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[0].isdigit() and words[1] == "kB":
            fields[name] = int(words[0]) << 10
    return fields
