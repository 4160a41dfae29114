"""Say what to do about a worker that takes more than was reserved for it. Pure but for what it remembers.

One request of a large shape is enough: ONNX Runtime's arena keeps what it once had. Such a worker is asked to shrink,
which costs some milliseconds and, at its next large request, the page faults. If that does not bring it below its
reservation, it is replaced by a fresh one. Where even a fresh one soon takes more, the bundle's figure is wrong for
this device: what it takes beyond is charged, and it is replaced ever more rarely. `resident` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from edgeinfer.clock import NS_PER_S

FIRST_PAUSE_NS: Final = 60 * NS_PER_S
LONGEST_PAUSE_NS: Final = 16 * FIRST_PAUSE_NS
"""Between two replacements of workers of one model; it doubles while they don't help."""
ASK_AGAIN_NS: Final = 10 * NS_PER_S


class Remedy(StrEnum):
    """What to do now."""

    NOTHING = "nothing"
    SHRINK = "shrink"
    RECYCLE = "recycle"


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """One worker at one moment."""

    pid: int
    held_bytes: int
    """Its own anonymous memory and all its slots."""
    shrinks: int
    """How often it has answered that it has shrunk."""
    shrunk_bytes: int
    """What it held when it last did."""


class GrowthWatch:
    """What was done so far about the workers of one model. Loop thread only."""

    def __init__(self, reserved_bytes: int) -> None:
        """`reserved_bytes` is reserved for each worker, its slots included."""
        self._reserved_bytes = reserved_bytes
        self._asked: dict[int, tuple[int, int]] = {}
        """By process id: the answers that it had given when it was asked, and when that was."""
        self._pause_ns = FIRST_PAUSE_NS
        self._recycle_from_ns = 0

    def remedy(self, worker: WorkerSize, now_ns: int) -> Remedy:
        """Return what to do about this worker now; the caller does it."""
        if worker.held_bytes <= self._reserved_bytes:
            self._asked.pop(worker.pid, None)
            if now_ns >= self._recycle_from_ns:
                self._pause_ns = FIRST_PAUSE_NS
            return Remedy.NOTHING
        shrinks, asked_ns = self._asked.get(worker.pid, (-1, 0))
        if shrinks < 0:
            return self._ask(worker, now_ns)
        if worker.shrinks == shrinks:
            return Remedy.NOTHING  # it is asked, and busy
        if worker.shrunk_bytes <= self._reserved_bytes:
            return self._ask(worker, now_ns)  # it had helped; it has grown again
        if now_ns >= self._recycle_from_ns:
            del self._asked[worker.pid]
            self._recycle_from_ns = now_ns + self._pause_ns
            self._pause_ns = min(2 * self._pause_ns, LONGEST_PAUSE_NS)
            return Remedy.RECYCLE
        return self._ask(worker, now_ns) if now_ns - asked_ns >= ASK_AGAIN_NS else Remedy.NOTHING

    def forget(self, pid: int) -> None:
        """The process is no more."""
        self._asked.pop(pid, None)

    def _ask(self, worker: WorkerSize, now_ns: int) -> Remedy:
        self._asked[worker.pid] = (worker.shrinks, now_ns)
        return Remedy.SHRINK
