"""Hold local work to the share of time that heat allows, by a budget of core-time.

Pure: a `Pace` is a value, and every change makes a new one. When local work may start at all is `scheduler`.

The budget is a token bucket. It fills at the rate that the duty cycle allows, up to `BURST_NS`' worth, and each run
takes its expected core-time when it starts and the difference when it ends. A run may start once its whole cost is
there (or the bucket is full, for runs that cost more than it holds: those leave a debt). The rate is lowered just so
far that a full bucket and a window's refill together stay within the promise:

    over any window of WINDOW_NS or longer, core-time used <= duty cycle x cores x window,

plus, in a single window, the part of one run that no bucket can hold (runs aren't interrupted for pacing). After the
debt is paid the share over the whole time holds for those too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

WINDOW_NS = 1_000_000_000
"""Shortest window over which the share is promised: much shorter than a heat sink's time constant (tens of seconds),
and as long as the governor's step."""
BURST_NS = 50_000_000
"""Idle time that is remembered: two frames that arrive together after a pause needn't wait for each other.
It costs BURST / (WINDOW + BURST), 5 % of the paced throughput."""
_SLACK_CORE_NS = 1.0
"""Rounding of float arithmetic on nanoseconds."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How much core-time may be used, from `at_ns` on. All amounts are core-nanoseconds."""

    limited: bool
    """False: nothing is held back, and nothing is counted."""
    rate: float = 0.0
    """Core-nanoseconds that come free per nanosecond."""
    capacity: float = 0.0
    """The most that is saved up."""
    level: float = 0.0
    """What is there at `at_ns`; negative is a debt."""
    at_ns: int = 0

    @property
    def stopped(self) -> bool:
        """Whether no local work may start at all."""
        return self.limited and self.rate <= 0.0

    def level_at(self, now_ns: int) -> float:
        """Return what is there at `now_ns`."""
        return min(self.capacity, self.level + self.rate * max(0, now_ns - self.at_ns))

    def ready_ns(self, cost: float, now_ns: int) -> int | None:
        """Return the earliest moment from `now_ns` on at which a run of `cost` may start; None for never."""
        if not self.limited:
            return now_ns
        if self.rate <= 0.0:
            return None
        missing = min(cost, self.capacity) - self.level_at(now_ns)
        return now_ns if missing <= _SLACK_CORE_NS else now_ns + math.ceil(missing / self.rate)

    def spent(self, cost: float, now_ns: int) -> Pace:
        """Return the pace after `cost` was used at `now_ns`; a negative cost gives back what was not used."""
        if not self.limited:
            return self
        at_ns = max(now_ns, self.at_ns)
        return replace(self, level=min(self.capacity, self.level_at(at_ns) - cost), at_ns=at_ns)

    def under(self, *, duty_cycle: float, cores: int, now_ns: int) -> Pace:
        """Return the pace under a new duty cycle and core count: what was saved shrinks with it, a debt stays.

        Pacing that begins starts with nothing saved, so the promise holds from this moment on.
        """
        if duty_cycle >= 1.0:
            return UNPACED
        share = max(0.0, duty_cycle) * cores * WINDOW_NS / (WINDOW_NS + BURST_NS)
        capacity = share * BURST_NS
        level = min(capacity, self.level_at(now_ns)) if self.limited else 0.0
        return Pace(limited=True, rate=share, capacity=capacity, level=level, at_ns=now_ns)


UNPACED = Pace(limited=False)
"""The pace of a board that is cool."""
