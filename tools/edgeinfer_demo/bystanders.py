"""Tell how much of the machine other programs used meanwhile: the demo's promises assume that it has it to itself."""

from __future__ import annotations

import os
from pathlib import Path

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.sensors.process import process_tree

_NS_PER_TICK = NS_PER_S // os.sysconf("SC_CLK_TCK")
_WORTH_SAYING_CORES = 0.25


class Bystanders:
    """CPU time of everybody but one process tree, since this was made."""

    def __init__(self, proc_root: Path, *, root_pid: int, clock: Clock) -> None:
        self._proc_root = proc_root
        self._root_pid = root_pid
        self._clock = clock
        self._began_ns = clock.now_ns()
        self._began_cpu_ns = self._others_ns()

    def cores(self) -> float:
        """Return how many cores they have used on average; ask while the tree still lives."""
        elapsed_ns = max(1, self._clock.now_ns() - self._began_ns)
        return max(0.0, (self._others_ns() - self._began_cpu_ns) / elapsed_ns)

    def _others_ns(self) -> int:
        user, nice, system, _, _, irq, softirq, steal = (
            int(ticks) for ticks in (self._proc_root / "stat").read_text().split("\n", 1)[0].split()[1:9]
        )
        own_ns = sum(item.cpu_ns + item.reaped_ns for item in process_tree(self._proc_root, self._root_pid))
        return (user + nice + system + irq + softirq + steal) * _NS_PER_TICK - own_ns


def note(others_cores: float, cores: int) -> str:
    """Return what people should know of it; empty when it is not worth a word."""
    if others_cores < _WORTH_SAYING_CORES:
        return ""
    return (
        f"other programs used {others_cores:.1f} of this machine's {cores} cores meanwhile: a check that failed, "
        "or a figure that is bad, may be theirs; run it again when they have ended"
    )
