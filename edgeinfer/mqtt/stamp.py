"""Say when and on whose clock a record was made, so that nobody has to trust a wall clock.

The wall time is a label for people. Order and durations come from `mono_ns` within one `boot`; `clock_synced`
says whether the kernel believes its wall clock at all (a board without a battery starts in 1970).
"""

from __future__ import annotations

import ctypes
import datetime as dt
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from edgeinfer.clock import Clock

_TIME_ERROR = 5
"""What adjtimex(2) answers while no time service has synchronized the clock."""


class Stamp(msgspec.Struct, frozen=True):
    """When a record was made, by three clocks."""

    at: str
    """Wall time, ISO 8601 in UTC with milliseconds: a label, it decides nothing."""
    clock_synced: bool
    """Whether the wall clock was synchronized when the record was made."""
    boot: str
    """Id of the boot that `mono_ns` counts in."""
    mono_ns: int
    """Monotonic nanoseconds since an arbitrary point of that boot."""


class Stamper:
    """Makes the stamps of one process. Cheap: one system call each."""

    def __init__(
        self,
        clock: Clock,
        *,
        boot: str,
        wall_s: Callable[[], float] = time.time,
        synced: Callable[[], bool] | None = None,
    ) -> None:
        self._clock = clock
        self._boot = boot
        self._wall_s = wall_s
        self._synced = synced or kernel_clock_synced

    def now(self) -> Stamp:
        """Stamp this moment."""
        wall = dt.datetime.fromtimestamp(self._wall_s(), dt.UTC)
        return Stamp(
            at=wall.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            clock_synced=self._synced(),
            boot=self._boot,
            mono_ns=self._clock.now_ns(),
        )


def read_boot_id(proc_root: Path = Path("/proc")) -> str:
    """Return the kernel's id of this boot, or `unknown` where there is none to read."""
    try:
        return (proc_root / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


class _Timex(ctypes.Structure):
    """struct timex of adjtimex(2), opaque but for `modes`, which stays 0: read only."""

    _fields_ = (("modes", ctypes.c_uint), ("rest", ctypes.c_char * 252))


def kernel_clock_synced() -> bool:
    """Return whether the kernel's clock is synchronized; False where the kernel doesn't say."""
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    if adjtimex is None:
        return False
    state: int = adjtimex(ctypes.byref(_Timex()))
    return 0 <= state < _TIME_ERROR
