"""Keep the nearby services that have advertised, and find those that may and can answer a request.

Owns the peers. Which of the able ones is asked, and what then becomes of the request, is `offload`.
"""

from __future__ import annotations

import logging
import random
from collections import Counter

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.errors import ProtocolError
from edgeinfer.execution.peer import DIGITS, DigestOf, Peer, PeerSnapshot, may_travel
from edgeinfer.mqtt.envelope import Advert, AdvertModel, decode
from edgeinfer.mqtt.message import Message
from edgeinfer.mqtt.topics import Topics
from edgeinfer.request import InferRequest, Reason, Refusal

_log = logging.getLogger(__name__)

_TELL_EVERY_NS = 10 * NS_PER_S
"""Between two lines about one peer; what it offers in the end is told with a later advert of the same."""
_MAX_PEERS = 64
"""More adverts than this on one site are a mistake or an attack; the surplus is counted and ignored."""


class PeerBook:
    """The nearby services of the site. Loop thread only."""

    def __init__(self, topics: Topics, *, digest_of: DigestOf, clock: Clock, dice: random.Random) -> None:
        self._topics = topics
        self._digest_of = digest_of
        self._clock = clock
        self._dice = dice
        self._peers: dict[str, Peer] = {}
        self._told: dict[str, tuple[str, int]] = {}
        """What was logged of each peer, and when."""
        self.counters: Counter[str] = Counter()
        """`advert_malformed`: adverts that could not be read, or were one too many."""

    def advertised(self, message: Message) -> None:
        """Take in a message on an advert topic; an empty one means that the peer was taken away for good."""
        name = self._topics.parse_advert(message.topic)
        if name is None or (name not in self._peers and len(self._peers) >= _MAX_PEERS):
            self.counters["advert_malformed"] += 1
            return
        if not message.payload:
            self._peers.pop(name, None)
            self._told.pop(name, None)
            return
        try:
            advert = decode(message.payload, Advert)
        except ProtocolError:
            self.counters["advert_malformed"] += 1
            return
        if name not in self._peers:
            self._peers[name] = Peer(name, clock=self._clock, dice=self._dice)
        self._peers[name].advertised(advert, self._clock.now_ns())
        self._tell(self._peers[name])

    def _tell(self, peer: Peer) -> None:
        """Log what a peer offers when that has changed; a warning when other bundles keep this device from using it."""
        offers, now_ns = peer.describe_offers(), self._clock.now_ns()
        told, told_ns = self._told.get(peer.name, ("", now_ns - _TELL_EVERY_NS))
        if offers == told or now_ns - told_ns < _TELL_EVERY_NS:
            return
        self._told[peer.name] = (offers, now_ns)
        gone = peer.why_gone(now_ns)
        trouble = "" if gone else (peer.why_useless(self._digest_of) or "; ".join(peer.mismatches(self._digest_of)))
        if trouble:
            _log.warning(
                "peer=%s offers=%r unusable=%r: install the same bundle folder on both sides",
                peer.name, offers, trouble,
            )  # fmt: skip
        else:
            _log.info("peer=%s offers=%r", peer.name, offers)

    def forget_adverts(self) -> None:
        """Believe no advert any more: the link is down. What they offer is told anew at the next connection."""
        for peer in self._peers.values():
            peer.lost()

    def able(
        self, request: InferRequest, digest: str, *, excluded: frozenset[str] = frozenset()
    ) -> list[tuple[Peer, AdvertModel]] | Refusal:
        """Return the peers that may and can be asked for exactly this bundle: at least one, or why there is none.

        `data_scope` only when scope is all that stands in the way of one of them.
        """
        now_ns = self._clock.now_ns()
        able, reasons, by_scope = [], [], False
        for peer in self._peers.values():
            offer = peer.offer(request.model, digest)
            why = self._why_not(peer, request, now_ns) or ("does not listen" if peer.name in excluded else None)
            if why is None and offer is not None and not may_travel(request.scope, peer.location):
                by_scope = True
                reasons.append(f"{peer.name} is at location {peer.location!r}")
            elif why is None and offer is not None:
                able.append((peer, offer))
            else:
                reasons.append(f"{peer.name}: {why or _other(peer, request.model, digest)}")
        if able:
            return able
        reason = Reason.DATA_SCOPE if by_scope else Reason.MODEL_UNAVAILABLE
        return Refusal(reason, f"no peer for {request.model}: {'; '.join(reasons) or 'none has advertised'}")

    def snapshot(self) -> tuple[PeerSnapshot, ...]:
        """Return how each peer stands."""
        now_ns = self._clock.now_ns()
        return tuple(peer.snapshot(now_ns, self._digest_of) for peer in self._peers.values())

    def _why_not(self, peer: Peer, request: InferRequest, now_ns: int) -> str | None:
        if (gone := peer.why_gone(now_ns)) is not None:
            return gone
        size = request.payload.size_bytes
        if 0 < peer.max_request_bytes < size:
            return f"takes {peer.max_request_bytes} bytes, not {size}"
        return None if peer.open_to_requests(now_ns) else "circuit open"


def _other(peer: Peer, model: str, digest: str) -> str:
    offer = peer.other(model)
    if offer is None:
        return "does not serve it"
    return f"has another bundle ({offer.digest[:DIGITS]} there, {digest[:DIGITS]} here)"
