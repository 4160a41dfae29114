"""Tell which CPUs may be used, how much of their time, how fast they run and how busy they are.

`os.cpu_count()` knows neither the affinity, nor offline cores, nor a quota; a runtime that sizes its thread pool by it
collapses in a container.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.sensors.cgroup import LimitState, cpu_limit, groups
from edgeinfer.sensors.cpufreq import FrequencyPolicy, read_policies
from edgeinfer.sensors.probe import read_static

_MOST_CPUS = 4096


@dataclass(frozen=True, slots=True)
class CpuClock:
    """Clock of the fastest cluster; None where there is no cpufreq (virtual machines, some containers)."""

    now_hz: int | None
    max_hz: int | None
    """What the hardware can do."""
    cap_hz: int | None
    """What policy allows at the moment: firmware, kernel and administrators lower it."""
    governor: str
    """`schedutil`, `ondemand`, …; empty when unknown."""


def usable_cpus(sys_root: Path, proc_root: Path) -> frozenset[int]:
    """Return the CPUs that this process may run on: its affinity, less those that are offline. Never empty."""
    status = read_static(proc_root / "self" / "status") or ""
    affinity: frozenset[int] = frozenset()
    for line in status.splitlines():
        if line.startswith("Cpus_allowed_list:"):
            affinity = parse_cpu_list(line.partition(":")[2].strip())
    online = parse_cpu_list(read_static(sys_root / "devices" / "system" / "cpu" / "online") or "")
    if affinity and online:
        return affinity & online or affinity
    return affinity or online or frozenset({0})


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the CPUs of a list such as `0-3,6`; empty when it is none."""
    cpus: set[int] = set()
    try:
        for part in filter(None, text.strip().split(",")):
            first, _, last = part.partition("-")
            low, high = int(first), int(last or first)
            if not 0 <= low <= high < _MOST_CPUS:
                return frozenset()
            cpus.update(range(low, high + 1))
    except ValueError:
        return frozenset()
    return frozenset(cpus)


def quota_share(proc_root: Path, sys_root: Path) -> float | None:
    """Return how many cores' time the tightest control group above us allows; None without a quota."""
    limits = [cpu_limit(group) for group in groups("cpu", proc_root, sys_root)]
    return min((item.cores for item in limits if item.cores is not None), default=None)


def quota_cores(proc_root: Path, sys_root: Path) -> int | None:
    """Return `quota_share` as a number of threads, rounded down and at least 1; None without a quota.

    Rounded up, the last thread would stall all others at every barrier once the quota of the period is spent.
    """
    share = quota_share(proc_root, sys_root)
    return None if share is None else max(1, math.floor(share))


def thread_budget(cpus: frozenset[int], quota: int | None) -> int:
    """Return how many threads may compute at once."""
    return max(1, len(cpus) if quota is None else min(len(cpus), quota))


def quota_faults(proc_root: Path, sys_root: Path) -> list[str]:
    """Return, in words, which quota files above us cannot be understood."""
    limits = [cpu_limit(group) for group in groups("cpu", proc_root, sys_root)]
    bad = {LimitState.EMPTY, LimitState.GARBAGE}
    return [f"{item.group}: {item.detail}" for item in limits if item.state in bad]


def cpu_clock(sys_root: Path) -> CpuClock:
    """Return the clock of the fastest cluster, which is where the work goes. Not for the loop thread."""
    return fastest_clock(read_policies(sys_root))


def fastest_clock(policies: Iterable[FrequencyPolicy]) -> CpuClock:
    """Return the clock of the fastest cluster that has a core online; of those alike, the first's."""
    best = CpuClock(None, None, None, "")
    clusters = list(policies)
    awake = [policy for policy in clusters if policy.cpus] or clusters
    for policy in awake:
        if best.max_hz is None or (policy.max_hz is not None and policy.max_hz > best.max_hz):
            best = CpuClock(policy.now_hz, policy.max_hz, policy.cap_hz, policy.governor)
    return best


def load_average(proc_root: Path) -> tuple[float, float, float] | None:
    """Return how many tasks ran, wanted to or waited for a disk, on average over 1, 5 and 15 minutes; None: unknown."""
    words = (read_static(proc_root / "loadavg") or "").split()[:3]
    try:
        one, five, fifteen = (float(word) for word in words)
    except ValueError:
        return None
    return (one, five, fifteen) if 0 <= min(one, five, fifteen) <= max(one, five, fifteen) < math.inf else None


def clock_share(clock: CpuClock, *, working: bool) -> float:
    """Return at which share of its full clock a busy core runs; 1.0 where it is unknown.

    The present clock of an idle board says nothing: it rises with the work. Then what policy allows is taken.
    `working` says that the clock is what the board has for work at this moment: it is busy, or held back.
    """
    if not clock.max_hz:
        return 1.0
    allowed_hz = clock.max_hz if clock.cap_hz is None else min(clock.max_hz, clock.cap_hz)
    if clock.now_hz and (working or clock.governor == "performance"):
        allowed_hz = min(allowed_hz, clock.now_hz)
    return allowed_hz / clock.max_hz or 1.0


class BusyMeter:
    """Tells how much of the CPUs' time was used since it was last asked. Owned by one reader."""

    def __init__(self, proc_root: Path) -> None:
        self._path = proc_root / "stat"
        self._last: tuple[int, int] | None = None

    def share(self) -> float | None:
        """Return the share of all online CPUs that worked since the last call, 0 to 1; None when unknown.

        Steps of a clock tick (10 ms): below a tenth of a second it is coarse.
        """
        now = self._read()
        last, self._last = self._last, now
        if now is None or last is None or now[1] <= last[1]:
            return None
        return min(1.0, max(0.0, (now[0] - last[0]) / (now[1] - last[1])))

    def _read(self) -> tuple[int, int] | None:
        first = (read_static(self._path) or "").partition("\n")[0].split()
        if len(first) < 6 or first[0] != "cpu" or not all(word.isdigit() for word in first[1:]):
            return None
        ticks = [int(word) for word in first[1:9]]  # guest time is part of user time already
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
