"""Know one nearby service: what it offers, whether it lives, how long it takes.

Owned by `offload`, one per advert topic. Adverts say what is there; observed round trips say what it costs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgeinfer.clock import NS_PER_MS, NS_PER_US, Clock
from edgeinfer.execution.breaker import BreakerState, CircuitBreaker
from edgeinfer.execution.executor import Estimate
from edgeinfer.execution.window import LatencyWindow
from edgeinfer.mqtt.envelope import Advert, AdvertModel
from edgeinfer.request import DataScope

_STALE_PERIODS = 3
"""Adverts that may be missing in a row before a peer counts as gone: the broker needs 1.5 keep-alives to say so."""
_LEAST_PERIOD_MS = 500
_LONGEST_PERIOD_MS = 3_600_000
_LONGEST_US = 3_600_000_000
"""Waits and run times that an advert may tell."""
_SEED_NETWORK_NS = 20 * NS_PER_MS
"""Both ways on a LAN with some load, pessimistically, until it is measured."""
_SEED_RUN_NS = 100 * NS_PER_MS
"""Run time of a model whose peer hasn't run it yet, until it is measured."""
_MAX_MODELS = 64
_MAX_NAMED = 4
"""Bundles that a text for people names."""
DIGITS = 6
"""Of a bundle digest, in such texts."""

DigestOf = Callable[[str], str | None]
"""Tells the digest of the bundle that is installed here under a model's name, None when there is none."""


def may_travel(scope: DataScope, location: str) -> bool:
    """Whether data of `scope` may go to a peer at `location`. The one place where this is decided.

    `device` never leaves. A location that we don't know is as far away as can be.
    """
    if scope is DataScope.DEVICE:
        return False
    return scope is DataScope.ANY or location == "site"


@dataclass(frozen=True, slots=True)
class PeerSnapshot:
    """How a peer stands, for reports."""

    name: str
    location: str
    usable: bool
    why_not: str
    in_flight: int
    p50_ns: int | None
    """Round trip without the peer's queue, over all its models; None before the first answer."""
    outcomes: dict[str, int]


class Peer:
    """A nearby service as this device sees it. Loop thread only."""

    def __init__(self, name: str, *, clock: Clock, dice: random.Random) -> None:
        self.name = name
        self._clock = clock
        self.breaker = CircuitBreaker(dice)
        self.in_flight = 0
        self.outcomes: Counter[str] = Counter()
        self._advert: Advert | None = None  # None: it isn't there, or we can't know
        self._heard_ns = 0
        self._wait_ns = 0
        self._trips: dict[str, LatencyWindow] = {}
        self._network = LatencyWindow(clock, seed_p99_ns=_SEED_NETWORK_NS)
        self._answers = LatencyWindow(clock, seed_p99_ns=_SEED_NETWORK_NS)

    def advertised(self, advert: Advert, now_ns: int) -> None:
        """Take in a new advert. One that comes after a silence is a sign of life."""
        if self.why_gone(now_ns) is not None and advert.online:
            self.breaker.heard(now_ns)
        self._advert, self._heard_ns = advert, now_ns
        self._wait_ns = _believed(advert.wait_us) * NS_PER_US

    def lost(self) -> None:
        """Forget what it offered: the link is down, or its advert was cleared."""
        self._advert = None

    def why_gone(self, now_ns: int) -> str | None:
        """Return why its advert can't be relied on, None when it can."""
        advert = self._advert
        if advert is None:
            return "no advert"
        if not advert.online:
            return "offline"
        period_ms = min(max(advert.period_ms, _LEAST_PERIOD_MS), _LONGEST_PERIOD_MS)
        patience_ns = _STALE_PERIODS * period_ms * NS_PER_MS
        if now_ns - self._heard_ns > patience_ns:
            return f"no advert for more than {patience_ns / 1e9:g} s"  # a fixed text: what changes is published
        return "draining" if advert.draining else None

    @property
    def location(self) -> str:
        """Where it says that it stands; empty when it isn't there."""
        return "" if self._advert is None else self._advert.location

    @property
    def max_request_bytes(self) -> int:
        """Largest body that it takes, 0 when it didn't say."""
        return 0 if self._advert is None else self._advert.max_request_bytes

    def offer(self, model: str, digest: str) -> AdvertModel | None:
        """Return what it advertises of exactly this bundle, None when it doesn't have it."""
        return next((offer for offer in self._offers if offer.name == model and offer.digest == digest), None)

    def other(self, model: str) -> AdvertModel | None:
        """Return what it advertises under the model's name, whichever bundle that is."""
        return next((offer for offer in self._offers if offer.name == model), None)

    def describe_offers(self) -> str:
        """Return what it advertises, in words that change when it does."""
        advert = self._advert
        if advert is None:
            return "nothing"
        if not advert.online:
            return f"nothing: it is offline ({advert.reason or 'no reason given'})"
        if advert.draining:
            return "nothing new: it is draining"
        models = _listed([f"{offer.name} {offer.digest[:DIGITS]}" for offer in self._offers])
        return f"{models or 'no model'} at location {advert.location}"

    def mismatches(self, digest_of: DigestOf) -> list[str]:
        """Return the models that it and this device both have, but in different bundles: those are never asked for."""
        found = []
        for offer in self._offers:
            here = digest_of(offer.name)
            if not offer.stateful and here is not None and here != offer.digest:
                found.append(f"{offer.name} {offer.digest[:DIGITS]} there, {here[:DIGITS]} here")
        return found

    def why_useless(self, digest_of: DigestOf) -> str:
        """Return why nothing that it offers can be asked for by this device; empty when something can."""
        if any(not offer.stateful and offer.digest == digest_of(offer.name) for offer in self._offers):
            return ""
        serves = f"it serves {_listed([offer.name for offer in self._offers]) or 'nothing'}"
        return f"no bundle in common: {_listed(self.mismatches(digest_of)) or serves}"

    @property
    def _offers(self) -> Sequence[AdvertModel]:
        return () if self._advert is None else self._advert.models[:_MAX_MODELS]

    def open_to_requests(self, now_ns: int) -> bool:
        """Whether its circuit breaker lets a request through now."""
        return self.breaker.state(now_ns) is not BreakerState.OPEN

    def estimate(self, offer: AdvertModel) -> Estimate:
        """Return what a request for `offer` would take: observed round trips, seeded by the advert."""
        window = self._window(offer)
        return Estimate(p50_ns=window.p50_ns, p99_ns=window.p99_ns, wait_ns=self._wait_ns, cores=0)

    @property
    def trip_ns(self) -> int | None:
        """Time on the wire, both ways together: the median of what was measured, None before the first answer."""
        return self._network.p50_ns if len(self._network) else None

    def observed(self, offer: AdvertModel, *, round_trip_ns: int, queue_ns: int, run_ns: int) -> int:
        """Learn from an answer, in time or late. Returns the time it spent on the wire."""
        network_ns = max(0, round_trip_ns - queue_ns - run_ns)
        self._network.add(network_ns)
        for window in (self._answers, self._window(offer)):
            window.add(max(0, round_trip_ns - queue_ns))
        self._wait_ns = queue_ns
        return network_ns

    def snapshot(self, now_ns: int, digest_of: DigestOf) -> PeerSnapshot:
        """Return how it stands."""
        why_not = self.why_gone(now_ns) or self.why_useless(digest_of)
        why_not = why_not or ("" if self.open_to_requests(now_ns) else "circuit open")
        return PeerSnapshot(
            name=self.name,
            location=self.location,
            usable=not why_not,
            why_not=why_not,
            in_flight=self.in_flight,
            p50_ns=self._answers.p50_ns if len(self._answers) else None,
            outcomes=dict(self.outcomes),
        )

    def _window(self, offer: AdvertModel) -> LatencyWindow:
        window = self._trips.get(offer.digest)
        if window is None:
            run_ns = _SEED_RUN_NS if offer.p99_us is None else _believed(offer.p99_us) * NS_PER_US
            if len(self._trips) >= _MAX_MODELS:
                self._trips.pop(next(iter(self._trips)))
            window = self._trips[offer.digest] = LatencyWindow(self._clock, seed_p99_ns=run_ns + _SEED_NETWORK_NS)
        return window


def _believed(duration_us: int) -> int:
    """Return a duration that a peer tells, or the nearest that can be."""
    return min(max(duration_us, 0), _LONGEST_US)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMED
    return "; ".join(names[:_MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
