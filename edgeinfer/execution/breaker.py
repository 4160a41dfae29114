"""Stop asking a peer that doesn't answer, and find out carefully when it does again.

One breaker per peer. Any answer, a refusal too, proves that the peer lives; silence, lost connections and answers that
are none count against it. What is asked and when is `offload`'s.
"""

from __future__ import annotations

import random
from enum import Enum

from edgeinfer.clock import NS_PER_S

_FAILURES_TO_OPEN = 3
"""Silences in a row: one may be a lost packet or a deadline that was too short."""
_FIRST_WAIT_NS = NS_PER_S
_LONGEST_WAIT_NS = 30 * NS_PER_S


class BreakerState(Enum):
    """Whether requests may go to the peer."""

    CLOSED = "closed"
    """Yes."""
    OPEN = "open"
    """No."""
    HALF_OPEN = "half_open"
    """One, to find out."""


class CircuitBreaker:
    """Counts silences in a row; opens after three, then lets single probes through, further and further apart."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._failures = 0
        self._wait_ns = _FIRST_WAIT_NS
        self._opened = False
        self._retry_at_ns = 0
        self._probing = False

    def state(self, now_ns: int) -> BreakerState:
        """Return whether requests may go to the peer now."""
        if not self._opened:
            return BreakerState.CLOSED
        if self._probing or now_ns < self._retry_at_ns:
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN

    def asked(self, now_ns: int) -> None:
        """Take note that a request goes out; in the half-open state it is the probe, and no other follows it."""
        if self.state(now_ns) is BreakerState.HALF_OPEN:
            self._probing = True

    def answered(self) -> None:
        """Take note that the peer answered: it lives."""
        self._failures, self._wait_ns = 0, _FIRST_WAIT_NS
        self._opened = self._probing = False

    def silent(self, now_ns: int) -> None:
        """Take note that no answer came by the deadline, or that the request was lost on the way."""
        self._failures += 1
        if self._opened and not self._probing:
            return  # an older request that was under way when it opened
        if self._probing or self._failures >= _FAILURES_TO_OPEN:
            self._open(now_ns)

    def absent(self, now_ns: int) -> None:
        """Take note that nobody is there to hear it, as the broker says: no need to try three times."""
        self._failures = max(self._failures, _FAILURES_TO_OPEN)
        self._open(now_ns)

    def abandoned(self) -> None:
        """Take note that a request was given up before anyone could know: a probe may be tried again at once."""
        self._probing = False

    def heard(self, now_ns: int) -> None:
        """Take note of a sign of life (a fresh advert): the next probe need not wait longer."""
        if self._opened and not self._probing:
            self._retry_at_ns = min(self._retry_at_ns, now_ns)

    def _open(self, now_ns: int) -> None:
        self._opened, self._probing = True, False
        self._retry_at_ns = now_ns + round(self._wait_ns * self._dice.uniform(0.5, 1.0))
        self._wait_ns = min(2 * self._wait_ns, _LONGEST_WAIT_NS)
