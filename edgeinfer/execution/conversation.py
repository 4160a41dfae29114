"""Match answers from next door to the requests that are under way, and tell late and foreign ones apart.

Owns the correlation data: random, so that nobody can answer what they weren't asked. An answer that nobody waits for
any more is counted and never delivered as anything; a late one still tells how long its peer takes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from edgeinfer.errors import ProtocolError
from edgeinfer.execution.peer import Peer
from edgeinfer.mqtt.envelope import AdvertModel
from edgeinfer.mqtt.exchange import Answer, decode_answer
from edgeinfer.mqtt.message import Message
from edgeinfer.request import Failure

_REMEMBERED = 256
"""Requests that are over whose late or repeated answers are still told from foreign ones."""


@dataclass(slots=True)
class Asked:
    """What is remembered of a request after it is over: no payload, no future."""

    peer: Peer
    offer: AdvertModel
    sent_ns: int
    answered: bool = False


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A request that a peer was asked to answer."""

    asked: Asked
    correlation: bytes
    answer: asyncio.Future[Answer | Failure]


class Conversations:
    """All requests that are under way, and the newest of those that are over. Loop thread only.

    `late` is called with a request that is over and the answer that came after all. `counters`: `answer_late`,
    `answer_repeated`, `answer_foreign`, `answer_malformed`.
    """

    def __init__(self, *, late: Callable[[Asked, Answer], None]) -> None:
        self._late = late
        self._under_way: dict[bytes, UnderWay] = {}
        self._over: OrderedDict[bytes, Asked] = OrderedDict()
        self.counters: Counter[str] = Counter()

    def begin(self, peer: Peer, offer: AdvertModel, sent_ns: int) -> UnderWay:
        """Wait for the answer to a new request from now on."""
        answer: asyncio.Future[Answer | Failure] = asyncio.get_running_loop().create_future()
        under_way = UnderWay(Asked(peer, offer, sent_ns), secrets.token_bytes(16), answer)
        self._under_way[under_way.correlation] = under_way
        return under_way

    def end(self, under_way: UnderWay) -> None:
        """Wait no longer: an answer that comes now is late."""
        self._under_way.pop(under_way.correlation, None)
        self._over[under_way.correlation] = under_way.asked
        while len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    def fail_all(self, failure: Failure) -> None:
        """Say of every request that is under way that no answer will come."""
        for under_way in self._under_way.values():
            if not under_way.answer.done():
                under_way.answer.set_result(failure)

    def answered(self, message: Message) -> None:
        """Take in a message on our reply topic, from whoever wrote it."""
        correlation = bytes(message.correlation or b"")
        under_way = self._under_way.get(correlation)
        asked = self._over.get(correlation) if under_way is None else under_way.asked
        if asked is None:
            self.counters["answer_foreign"] += 1
            return
        if asked.answered:
            self.counters["answer_repeated"] += 1
            return
        asked.answered = True
        try:
            answer: Answer | Failure = decode_answer(message)
        except ProtocolError as error:
            self.counters["answer_malformed"] += 1
            answer = Failure("bad_answer", f"{asked.peer.name}: {error}")
        if under_way is None:
            self.counters["answer_late"] += 1
            if isinstance(answer, Answer):
                self._late(asked, answer)
        elif not under_way.answer.done():
            under_way.answer.set_result(answer)
