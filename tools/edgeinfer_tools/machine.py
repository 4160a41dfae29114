"""What the build machine is: it colours every figure that is measured on it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.artifact.board import Board


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that measures."""

    cpu: str
    """CPU name, for people."""
    flags: list[str]
    """As /proc/cpuinfo lists them, sorted."""
    cores: int
    """That this process may use."""
    clock_mhz: float | None = None
    """The highest, where the kernel tells it."""


def this_machine(proc: Path = Path("/proc")) -> Machine:
    """Read CPU name and flags of this machine."""
    fields: dict[str, str] = {}
    for line in (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    name = fields.get("model name") or fields.get("model") or platform.machine()
    flags = (fields.get("flags") or fields.get("features") or "").split()
    cores = len(os.sched_getaffinity(0))
    return Machine(cpu=name, flags=sorted(flags), cores=cores, clock_mhz=_clock_mhz(proc))


def thread_counts(board: Board, machine: Machine) -> list[int]:
    """Return 1 and the powers of two up to the board's cores, as far as this machine has them."""
    most = min(board.cpu.cores, machine.cores)
    return sorted({1, most, *(1 << k for k in range(1, 8) if 1 << k <= most)})


def _clock_mhz(proc: Path, system: Path = Path("/sys")) -> float | None:
    """Return the highest clock of this machine in MHz, None where the kernel tells none."""
    try:
        text = (system / "devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text(encoding="ascii")
        return int(text) / 1000
    except (OSError, ValueError):
        pass
    try:
        lines = (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return max(float(line.partition(":")[2]) for line in lines if line.lower().startswith("cpu mhz"))
    except (OSError, ValueError):
        return None
