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
SHORT_NS = 10 * NS_PER_S
SHORT_SESSIONS = 3
"""So many short sessions in a row, with no failed attempt between them, look like a second client with our id.
MQTT 5 has a reason code for that, but mosquitto 2.0.11 just closes the connection."""


class Backoff:
    """Counts failures in a row per cause, and answers with waits. Pure but for its own counters and the dice."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._failures = dict.fromkeys(WAITS, 0)
        self._short = 0

    def next(self, cause: LinkState, *, lived_ns: int | None) -> tuple[LinkState, int]:
        """Return the cause as it looks in the light of what went before, and the wait in nanoseconds.

        `lived_ns` is how long the session lived that ended, None when an attempt failed. The wait counts from the
        start of the attempt, or from the end of the session, and is between half and all of the table's.
        """
        self._short = self._short + 1 if lived_ns is not None and lived_ns < SHORT_NS else 0
        if lived_ns is not None and lived_ns >= STABLE_NS:
            self._failures[LinkState.UNREACHABLE] = self._failures[LinkState.AUTH_FAILED] = 0
        if lived_ns is not None and lived_ns >= STABLE_AFTER_TAKEOVER_NS:
            self._failures[LinkState.TAKEN_OVER] = 0
        if cause is LinkState.UNREACHABLE and self._short >= SHORT_SESSIONS:
            cause = LinkState.TAKEN_OVER
        self._failures[cause] += 1
        return cause, round(WAITS[cause].after(self._failures[cause]) * self._dice.uniform(0.5, 1.0))
