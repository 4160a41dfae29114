"""Decide how long to wait before the next connection attempt, by what ended the last one.

One literal table. The waits grow while attempts fail and are jittered, so that a site's devices don't come back in
step. A session that was short doesn't reset them: two devices with one client id would else throw each other out
several times a second, for ever.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from edgeinfer.clock import NS_PER_S


class LinkState(StrEnum):
    """How a link stands."""

    CONNECTING = "connecting"
    """No attempt has ended yet."""
    CONNECTED = "connected"
    """The broker has accepted us and acknowledged our subscriptions."""
    UNREACHABLE = "unreachable"
    """The broker can't be reached, or the connection was lost; attempts go on."""
    AUTH_FAILED = "auth_failed"
    """The broker refuses our credentials; attempts go on, rarely."""
    TAKEN_OVER = "taken_over"
    """Another client with our client id has thrown us out; attempts go on, rarely."""
    CLOSED = "closed"
    """Ended on purpose."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits before the 1st, 2nd, … attempt in a row: `first_ns` x `growth`^n, at most `cap_ns`."""

    first_ns: int
    growth: float
    cap_ns: int

    def after(self, failures: int) -> int:
        """Return the wait after that many failures in a row (at least one), before jitter."""
        return min(self.cap_ns, round(self.first_ns * self.growth ** min(failures - 1, 200)))


WAITS = {
    # Grows by 1.2: the wait stays near a fifth of the outage, so that 10 s without a broker are made up for within 3 s.
    LinkState.UNREACHABLE: Waits(NS_PER_S // 4, 1.2, 30 * NS_PER_S),
    # Brokers lock out who hammers them: at most 7 attempts in the first 5 minutes.
    LinkState.AUTH_FAILED: Waits(10 * NS_PER_S, 2.0, 300 * NS_PER_S),
    LinkState.TAKEN_OVER: Waits(5 * NS_PER_S, 2.0, 300 * NS_PER_S),
}
STABLE_NS = 30 * NS_PER_S
"""A session that lived this long has shown that the broker is well: the count of failures starts again."""
STABLE_AFTER_TAKEOVER_NS = 900 * NS_PER_S
"""Longer than the longest wait of the other client: only then has it really given up."""


class Backoff:
    """Counts failures in a row per cause, and answers with waits. Pure but for its own counters and the dice."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._failures = dict.fromkeys(WAITS, 0)

    def wait_ns(self, cause: LinkState, *, lived_ns: int | None) -> int:
        """Return the wait from the start of the attempt that failed, or from the end of the session that was lost.

        `lived_ns` is how long the session lived, None when there was none. Between half and all of the table's wait.
        """
        if lived_ns is not None and lived_ns >= STABLE_NS:
            self._failures[LinkState.UNREACHABLE] = self._failures[LinkState.AUTH_FAILED] = 0
        if lived_ns is not None and lived_ns >= STABLE_AFTER_TAKEOVER_NS:
            self._failures[LinkState.TAKEN_OVER] = 0
        self._failures[cause] += 1
        full_ns = WAITS[cause].after(self._failures[cause])
        return round(full_ns * self._dice.uniform(0.5, 1.0))
