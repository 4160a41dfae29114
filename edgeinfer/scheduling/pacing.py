"""Hold local work to the share of time that heat allows, by a budget of core-time.

Pure: a `Pace` is a value, and every change makes a new one. When local work may start at all is `scheduler`.

The budget is a token bucket that every run takes from: its expected core-time when it starts, the difference when it
ends. It fills at the rate that the duty cycle allows, and saves up `BURST_NS`' worth at most. A run may start in its
turn once its whole cost is there (or the bucket is full, for runs that cost more than it holds: those leave a debt).

A long run's debt must not stop the small ones, whose heat is nothing: a voice-activity loop of 0.3 ms in every 32 would
lose all its chunks while a run of 160 ms is paid for. So there is an *express lane*: a second meter, which fills at
`EXPRESS_SHARE` of the rate, up to that share of the burst. A run that the meter covers may start out of its turn,
whatever the budget owes. It is taken from the budget all the same, so that the long runs pay by waiting longer, by at
most 1 / (1 - EXPRESS_SHARE); and what small runs leave unused is in the budget, as if the meter weren't there. What is
small needs no setting: a run that costs no more than the meter can hold (on one core at a duty cycle of 0.35: 3.3 ms).

The promise, for runs that take what was expected of them:

    over any window of WINDOW_NS or longer, core-time of the runs started <= duty cycle x cores x window,

plus, in a single window, the part of one run that no bucket can hold (runs aren't interrupted for pacing). Why: a
start in turn leaves the budget at 0 or above (or at that one part's debt), and express starts lower it by no more than
the meter holds before it recovers. So a window uses at most the refill, a full budget, and a full meter; together
those two hold BURST_NS' worth, and the rate is lowered just so far that this fits. After debts are paid the share over
the whole time holds for the longest runs, too; and for wrong estimates, because both meters are corrected by what a run
really took.
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
EXPRESS_SHARE = 0.2
"""Of what is allowed, how much small runs may take before their turn. At the lowest duty cycle of any board file (0.2)
that is 3.8 % of each core: three loops like the one above, with room for a slow core. More would make long runs wait
for what isn't negligible: with a fifth, by a quarter longer at most."""
_SLACK_CORE_NS = 1.0
"""Rounding of float arithmetic on nanoseconds."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Core-time that comes free at a steady rate. All amounts are core-nanoseconds."""

    rate: float = 0.0
    """Core-nanoseconds that come free per nanosecond."""
    capacity: float = 0.0
    """The most that is saved up."""
    level: float = 0.0
    """What is there at `at_ns`; negative is a debt."""
    at_ns: int = 0

    def level_at(self, now_ns: int) -> float:
        """Return what is there at `now_ns`."""
        return min(self.capacity, self.level + self.rate * max(0, now_ns - self.at_ns))

    def covers(self, cost: float, now_ns: int) -> bool:
        """Return whether `cost` is there, or as much of it as can be."""
        return min(cost, self.capacity) - self.level_at(now_ns) <= _SLACK_CORE_NS

    def ready_ns(self, cost: float, now_ns: int) -> int:
        """Return the earliest moment from `now_ns`, and from the last spending, on at which `cost` is covered.

        The rate must not be zero.
        """
        at_ns = max(now_ns, self.at_ns)
        missing = min(cost, self.capacity) - self.level_at(at_ns)
        return at_ns if missing <= _SLACK_CORE_NS else at_ns + math.ceil(missing / self.rate)

    def spent(self, cost: float, now_ns: int) -> Bucket:
        """Return the bucket after `cost` was used at `now_ns`; a negative cost gives back what was not used."""
        at_ns = max(now_ns, self.at_ns)
        return Bucket(self.rate, self.capacity, min(self.capacity, self.level_at(at_ns) - cost), at_ns)

    def refitted(self, *, rate: float, capacity: float, now_ns: int) -> Bucket:
        """Return the bucket with another rate and capacity: what was saved shrinks with it, a debt stays."""
        return Bucket(rate, capacity, min(capacity, self.level_at(now_ns)), now_ns)


@dataclass(frozen=True, slots=True)
class Pace:
    """How much core-time may be used from now on, and by whom."""

    limited: bool
    """False: nothing is held back, and nothing is counted."""
    budget: Bucket = Bucket()
    """What every run takes from."""
    express: Bucket = Bucket()
    """How much of it small runs may take before their turn."""

    @property
    def stopped(self) -> bool:
        """Whether no local work may start at all."""
        return self.limited and self.budget.rate <= 0.0

    def is_small(self, cost: float) -> bool:
        """Return whether a run of `cost` may take the express lane."""
        return self.limited and cost <= self.express.capacity

    def ready_ns(self, cost: float, now_ns: int) -> int | None:
        """Return the earliest moment from `now_ns` on at which a run of `cost` may start; None for never."""
        if not self.limited:
            return now_ns
        if self.stopped:
            return None
        in_turn_ns = self.budget.ready_ns(cost, now_ns)
        return min(in_turn_ns, self.express.ready_ns(cost, now_ns)) if self.is_small(cost) else in_turn_ns

    def by_express(self, cost: float, now_ns: int) -> bool:
        """Return whether a run that starts at `now_ns` takes the express lane: if it may, and has to or can.

        Even when the budget covers it: who waits there in front of it must not pay for many small ones behind it.
        """
        return self.is_small(cost) and (self.express.covers(cost, now_ns) or not self.budget.covers(cost, now_ns))

    def spent(self, cost: float, now_ns: int, *, express: bool = False) -> Pace:
        """Return the pace after `cost` was used at `now_ns`; a negative cost gives back what was not used."""
        if not self.limited:
            return self
        lane = self.express.spent(cost, now_ns) if express else self.express
        return Pace(self.limited, self.budget.spent(cost, now_ns), lane)

    def worst(self) -> Bucket:
        """Return what is left in turn if small runs use all that they may: promises are made with that."""
        budget, express = self.budget, self.express
        return replace(budget, rate=budget.rate - express.rate, level=budget.level - express.capacity)

    def under(self, *, duty_cycle: float, cores: int, now_ns: int) -> Pace:
        """Return the pace under a new duty cycle and core count: what was saved shrinks with it, a debt stays.

        Pacing that begins starts with nothing saved, so the promise holds from this moment on.
        """
        if duty_cycle >= 1.0:
            return UNPACED
        rate = max(0.0, duty_cycle) * cores * WINDOW_NS / (WINDOW_NS + BURST_NS)
        burst = rate * BURST_NS
        return Pace(
            limited=True,
            budget=self.budget.refitted(rate=rate, capacity=burst * (1 - EXPRESS_SHARE), now_ns=now_ns),
            express=self.express.refitted(rate=rate * EXPRESS_SHARE, capacity=burst * EXPRESS_SHARE, now_ns=now_ns),
        )


UNPACED = Pace(limited=False)
"""The pace of a board that is cool."""
