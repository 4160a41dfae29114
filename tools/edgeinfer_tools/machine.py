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


def this_machine(proc: Path = Path("/proc")) -> Machine:
    """Read CPU name and flags of this machine."""
    fields: dict[str, str] = {}
    for line in (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    name = fields.get("model name") or fields.get("model") or platform.machine()
    flags = (fields.get("flags") or fields.get("features") or "").split()
    return Machine(cpu=name, flags=sorted(flags), cores=len(os.sched_getaffinity(0)))


def thread_counts(board: Board, machine: Machine) -> list[int]:
    """Return 1 and the powers of two up to the board's cores, as far as this machine has them."""
    most = min(board.cpu.cores, machine.cores)
    return sorted({1, most, *(1 << k for k in range(1, 8) if 1 << k <= most)})
