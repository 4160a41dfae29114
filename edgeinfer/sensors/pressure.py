"""Tell how hard the kernel has to work for memory: refaults, major faults, and the time that work waits for it.

A machine whose page cache no longer holds what is in use is as slow as one without memory, while every figure of free
memory still looks well: only these show it. Each may be missing (no PSI in many board kernels, no refault counter under
control groups of version 1) or garbage; both are defined states. What follows from them is the ledger's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.clock import NS_PER_S
from edgeinfer.sensors.cgroup import Group
from edgeinfer.sensors.probe import read_static

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_REFAULTS = ("workingset_refault_file", "workingset_refault")
"""As Linux names them since 5.9, and before."""
_YOUNG_NS = 15 * NS_PER_S
"""A process younger than this still reads its files for the first time: its faults say nothing about pressure."""


@dataclass(frozen=True, slots=True)
class MemoryPressure:
    """PSI: share of the time, in percent over ten seconds, that work waited for memory."""

    some_avg10: float
    """At least one task waited."""
    full_avg10: float
    """All tasks waited."""


@dataclass(frozen=True, slots=True)
class FaultCounters:
    """What the kernel has counted so far; None where it doesn't count, or says what can't be read."""

    refaulted_pages: int | None = None
    """Pages of files that came back although they had been dropped: of our control group, version 2 only."""
    group_major_faults: int | None = None
    """Of our control group under version 1, which doesn't know refaults."""
    major_faults: Mapping[int, int] | None = None
    """Of our processes by process id: page faults that had to wait for the disk."""
    psi: MemoryPressure | None = None
    """Of our control group where it has its own, else of the machine."""
    machine_wide: bool = False
    """Whether `psi` is the machine's: who waits there may have nothing to do with us."""
    garbage: tuple[str, ...] = ()
    """Files that are there and say nothing that makes sense."""

    @property
    def sources(self) -> tuple[str, ...]:
        """What pressure can be judged by here."""
        named = {
            "refaults": self.refaulted_pages,
            "group major faults": self.group_major_faults,
            "major faults": self.major_faults,
            "psi of the machine" if self.machine_wide else "psi": self.psi,
        }
        return tuple(name for name, value in named.items() if value is not None)


@dataclass(frozen=True, slots=True)
class PressureSample:
    """How things went since the sample before; None where there is no such sensor."""

    refault_bytes_s: float | None = None
    """Bytes a second that had to be read again."""
    major_faults_s: float | None = None
    """Page faults a second that waited for the disk, of processes that are past their loading."""
    some_percent: float | None = None
    full_percent: float | None = None
    machine_wide: bool = False
    """Whether the two before are of the whole machine."""
    group_faults_s: float | None = None
    """As `major_faults_s`, of everything in our control group, where that doesn't count refaults."""


def read_counters(proc_root: Path, group: Group | None, pids: Iterable[int]) -> FaultCounters:
    """Return the counters now, for our own control group (None without) and our processes."""
    garbage: list[str] = []
    refaults = group_faults = psi = None
    if group is not None:
        stat = group.path / "memory.stat"
        text = read_static(stat)
        names = _REFAULTS if group.version == 2 else ("total_pgmajfault", "pgmajfault")
        found = None if text is None else _counter(text, names)
        if text is not None and found is None and not _is_table(text):
            garbage.append(str(stat))
        if group.version == 2:
            refaults = found
            psi = _psi(group.path / "memory.pressure", garbage)
        else:
            group_faults = found
    machine_wide = psi is None
    if psi is None:
        psi = _psi(proc_root / "pressure" / "memory", garbage)
    faults = {pid: count for pid in pids if (count := _major_faults(proc_root, pid)) is not None}
    return FaultCounters(refaults, group_faults, faults or None, psi, machine_wide, tuple(garbage))


class PressureMeter:
    """Makes rates of counters. One for each set of counters; loop thread only."""

    def __init__(self) -> None:
        self._last: FaultCounters | None = None
        self._last_ns = 0
        self._since_ns: dict[int, int] = {}

    def sample(self, counters: FaultCounters, now_ns: int) -> PressureSample:
        """Return what happened since the last call; at the first one, and where a counter began anew, nothing did."""
        last, seconds = self._last, (now_ns - self._last_ns) / NS_PER_S
        faults = counters.major_faults or {}
        self._since_ns = {pid: self._since_ns.get(pid, now_ns) for pid in faults}
        grown_up = [pid for pid in faults if now_ns - self._since_ns[pid] >= _YOUNG_NS]
        self._last, self._last_ns = counters, now_ns
        psi = counters.psi
        some, full = (psi.some_avg10, psi.full_avg10) if psi else (None, None)
        if last is None or seconds <= 0:
            return PressureSample(None, None, some, full, counters.machine_wide)
        refaults = _rate(last.refaulted_pages, counters.refaulted_pages, seconds)
        ours = None
        if counters.major_faults is not None:
            before = last.major_faults or {}
            ours = sum(max(0, faults[pid] - before.get(pid, faults[pid])) for pid in grown_up) / seconds
        group = None
        if len(grown_up) == len(faults):  # nobody loads, so the group's faults are no first reads of ours
            group = _rate(last.group_major_faults, counters.group_major_faults, seconds)
        reread = None if refaults is None else refaults * _PAGE_BYTES
        return PressureSample(reread, ours, some, full, counters.machine_wide, group)


def _rate(before: int | None, now: int | None, seconds: float) -> float | None:
    return None if before is None or now is None else max(0, now - before) / seconds


def parse_psi(text: str) -> MemoryPressure | None:
    """Return what a PSI file says, None when it makes no sense."""
    averages = {}
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        for word in rest.split():
            name, _, value = word.partition("=")
            if name == "avg10":
                try:
                    averages[kind] = float(value)
                except ValueError:
                    return None
    values = [averages.get("some", -1.0), averages.get("full", 0.0)]
    return MemoryPressure(*values) if all(0 <= value <= 100 for value in values) else None


def _psi(path: Path, garbage: list[str]) -> MemoryPressure | None:
    text = read_static(path)
    if text is None:  # none in this kernel, or switched off (reading it then fails)
        return None
    found = parse_psi(text)
    if found is None:
        garbage.append(str(path))
    return found


def _is_table(text: str) -> bool:
    """Whether every line is a name and a number, as in a memory.stat."""
    return bool(text) and all(len(words := line.split()) == 2 and words[1].isdigit() for line in text.splitlines())


def _counter(text: str, names: tuple[str, ...]) -> int | None:
    values = dict(words for line in text.splitlines() if len(words := line.split()) == 2)
    return next((int(values[name]) for name in names if values.get(name, "").isdigit()), None)


def _major_faults(proc_root: Path, pid: int) -> int | None:
    _, _, rest = (read_static(proc_root / str(pid) / "stat") or "").rpartition(")")
    fields = rest.split()  # the name before may hold spaces and parentheses
    return int(fields[9]) if len(fields) > 9 and fields[9].isdigit() else None
