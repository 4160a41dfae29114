"""Take commands from the fleet link, have them carried out once, and answer each.

Owns the waiting commands and the order in which they run. What a command may look like is `judge`, what there are is
`commands`, what was answered before is `journal`, what they do is the daemon's `Actions`. The link's callback only
judges and enqueues; two tasks carry out: one for changes, in order of arrival, and one for questions, which don't wait
for a load that takes its time.

A sender gets exactly one reply per command and delivery: at its response topic with its correlation data, else at
`…/reply`, where nothing is ever held back for a reader who may not exist.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.control.commands import Actions, Refused, describe_fault
from edgeinfer.control.journal import MAX_REPLY_BYTES, Entry, Journal, fingerprint
from edgeinfer.control.judge import Address, Moment, Nack, Order, judge
from edgeinfer.errors import EdgeInferError
from edgeinfer.mqtt.envelope import JSON_CONTENT_TYPE, Reply, encode
from edgeinfer.mqtt.message import Keep, Message
from edgeinfer.mqtt.stamp import Stamper
from edgeinfer.mqtt.topics import Topics

log = logging.getLogger(__name__)

MAX_WAITING = 32
"""Commands that wait, of each kind; one more is refused with `busy` and may be sent again."""
_MAX_ANSWERED = 64
"""Answered questions that are remembered, in memory only."""
_MAX_RETAINED = 64
"""Retained commands that were reported; they come again at every connect."""
_MAX_ADDRESSES = 4
"""Reply addresses of one command that was sent several times."""
_MAX_DETAIL = 1000
_INTERRUPTED = "the service ended while it was carried out; look at the state, then send a new command"
_LOG_EVERY_NS = 60 * NS_PER_S
"""A flood of refused commands is one line a minute with a count."""


class CommandLink(Protocol):
    """What the plane needs of an `MqttLink`."""

    def subscribe(self, topic_filter: str, handler: Callable[[Message], None], *, qos: int = 1) -> None:
        """Have `handler` called with each message that matches."""
        ...

    def send(self, message: Message, keep: Keep) -> None:
        """Publish, or do as `keep` says; never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class _Ending:
    """What became of a command, as its reply says it."""

    outcome: str
    reason: str = ""
    detail: str = ""
    result: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Pending:
    """A command that waits or is being carried out."""

    order: Order
    fingerprint: str
    addresses: list[Address] = field(default_factory=list)


class CommandPlane:
    """The device's side of fleet commands. Loop thread only; `run` is its one task."""

    def __init__(
        self,
        link: CommandLink,
        topics: Topics,
        actions: Actions,
        *,
        journal: Journal,
        stamper: Stamper,
        clock: Clock,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._link = link
        self._topics = topics
        self._actions = actions
        self._journal = journal
        self._stamper = stamper
        self._clock = clock
        self._wall_s = wall_s
        self._changes: asyncio.Queue[_Pending] = asyncio.Queue(MAX_WAITING)
        self._questions: asyncio.Queue[_Pending] = asyncio.Queue(MAX_WAITING)
        self._pending: dict[str, _Pending] = {}
        self._answered: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self._retained: deque[tuple[str, str]] = deque(maxlen=_MAX_RETAINED)
        self._logged_ns: int | None = None
        self._unlogged = 0
        self.counters: Counter[str] = Counter()
        """`received`, `ok`, `duplicate`, and `refused.REASON` and `failed.REASON`."""
        link.subscribe(topics.command_filter, self._receive)

    async def run(self) -> None:
        """Carry out commands for ever. When cancelled, those that still wait are refused with `stopping`."""
        try:
            await self._report_interrupted()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._work(self._changes), name="control[changes]")
                group.create_task(self._work(self._questions), name="control[questions]")
        finally:
            for queue in (self._changes, self._questions):
                while not queue.empty():
                    self._refuse_pending(queue.get_nowait(), "stopping", "the service is stopping")

    # Callback of the link: judge and enqueue, nothing that waits

    def _receive(self, message: Message) -> None:
        self.counters["received"] += 1
        stamp = self._stamper.now()
        moment = Moment(self._clock.now_ns(), self._wall_s(), stamp.clock_synced)
        verdict = judge(message, self._topics, moment)
        if isinstance(verdict, Nack):
            self._refuse(verdict)
        elif verdict is not None:
            self._accept(verdict)

    def _accept(self, order: Order) -> None:
        mark = fingerprint(order.name, order.arguments)
        if (known := self._known(order.id)) is not None:
            self._repeat(order, mark, *known)
            return
        queue = self._changes if order.verb.changes else self._questions
        if queue.full():
            detail = f"{queue.qsize()} commands wait already; send it again later"
            self._refuse(Nack(order.id, order.name, "busy", detail, order.address))
            return
        self._pending[order.id] = pending = _Pending(order, mark, [order.address])
        queue.put_nowait(pending)

    def _known(self, command_id: str) -> tuple[str, bytes | None] | None:
        """Return fingerprint and reply of a command that was seen before; no reply yet while it runs or waits."""
        if (entry := self._journal.find(command_id)) is not None:
            return entry.fingerprint, entry.reply
        if (answered := self._answered.get(command_id)) is not None:
            return answered
        pending = self._pending.get(command_id)
        return None if pending is None else (pending.fingerprint, None)

    def _repeat(self, order: Order, mark: str, known_mark: str, reply: bytes | None) -> None:
        """Answer a command whose id was seen before: the same reply again, at once or when it is there."""
        if mark != known_mark:
            detail = "another command had this id; every command needs an id of its own"
            self._refuse(Nack(order.id, order.name, "id_reused", detail, order.address))
            return
        self.counters["duplicate"] += 1
        if reply is not None:
            self._send(reply, order.address)
        elif (pending := self._pending.get(order.id)) is not None and order.address not in pending.addresses:
            del pending.addresses[_MAX_ADDRESSES - 1 :]
            pending.addresses.append(order.address)

    def _refuse(self, nack: Nack) -> None:
        if nack.reason == "retained":
            if (nack.name, nack.id) in self._retained:
                return
            self._retained.append((nack.name, nack.id))
            if self._known(nack.id) is not None:
                return  # it was obeyed when it came first; its sender has, or will have, an answer
        self._log_refusal(nack)
        self._send(self._encode(nack.id, nack.name, _Ending("refused", nack.reason, nack.detail)), nack.address)

    # Carrying out

    async def _work(self, queue: asyncio.Queue[_Pending]) -> None:
        while True:
            pending = await queue.get()
            order = pending.order
            if order.void_ns is not None and self._clock.now_ns() > order.void_ns:
                self._refuse_pending(pending, "expired", "its time was up before its turn came")
                continue
            try:
                ending = await self._begin(pending)
            except asyncio.CancelledError:
                await self._finish(pending, _Ending("failed", "interrupted", _INTERRUPTED))
                raise
            await self._finish(pending, ending)

    async def _begin(self, pending: _Pending) -> _Ending:
        order, address = pending.order, pending.addresses[0]
        if order.verb.changes:
            entry = Entry(order.id, order.name, pending.fingerprint, address.topic, address.correlation)
            await self._journal.begin(entry)
        log.info("command=%s id=%s begun", order.name, order.id)
        return await self._carry_out(order)

    async def _finish(self, pending: _Pending, ending: _Ending) -> None:
        order = pending.order
        log.info("command=%s id=%s outcome=%s reason=%s", order.name, order.id, ending.outcome, ending.reason)
        reply = self._encode(order.id, order.name, ending)
        if order.verb.changes:
            await self._journal.finish(order.id, reply)
        else:
            self._answered[order.id] = (pending.fingerprint, reply)
            while len(self._answered) > _MAX_ANSWERED:
                self._answered.popitem(last=False)
        self._pending.pop(order.id, None)
        for address in pending.addresses:
            self._send(reply, address)

    async def _carry_out(self, order: Order) -> _Ending:
        try:
            async with asyncio.timeout(order.verb.limit_ns / NS_PER_S):
                answer = await order.verb.carry_out(self._actions, order.arguments)
        except TimeoutError:
            return _Ending("failed", "timeout", f"not done within {order.verb.limit_ns / NS_PER_S:g} s")
        except EdgeInferError as error:
            return _Ending(*describe_fault(error), str(error))
        except Exception as error:  # a bug in one command must not end inference; it is told and logged
            log.exception("command=%s id=%s failed", order.name, order.id)
            return _Ending("failed", "internal", f"this is a bug: {type(error).__name__}: {error}")
        if isinstance(answer, Refused):
            return _Ending("refused", answer.reason, answer.detail)
        return _Ending("ok", result=answer)

    async def _report_interrupted(self) -> None:
        """Answer the commands that the last run of the service had begun and not finished."""
        for entry in self._journal.interrupted():
            reply = self._encode(entry.id, entry.verb, _Ending("failed", "interrupted", _INTERRUPTED))
            await self._journal.finish(entry.id, reply)
            self._send(reply, Address(entry.topic, entry.correlation, asked=entry.topic != self._topics.reply))

    def _refuse_pending(self, pending: _Pending, reason: str, detail: str) -> None:
        self._pending.pop(pending.order.id, None)
        for address in pending.addresses:
            self._refuse(Nack(pending.order.id, pending.order.name, reason, detail, address))

    # Answering

    def _encode(self, command_id: str, verb: str, ending: _Ending) -> bytes:
        self.counters[ending.outcome if ending.outcome == "ok" else f"{ending.outcome}.{ending.reason}"] += 1
        record = Reply(
            stamp=self._stamper.now(),
            id=command_id,
            verb=verb,
            outcome=ending.outcome,
            reason=ending.reason,
            detail=ending.detail[:_MAX_DETAIL],
            result=ending.result,
        )
        reply = encode(record)
        if len(reply) > MAX_REPLY_BYTES:
            detail = f"the result of {len(reply)} bytes is too long to send"
            reply = encode(msgspec.structs.replace(record, detail=detail, result={}))
        return reply

    def _send(self, reply: bytes, address: Address) -> None:
        message = Message(
            topic=address.topic,
            payload=reply,
            qos=1 if address.asked else 0,
            correlation=address.correlation,
            content_type=JSON_CONTENT_TYPE,
        )
        self._link.send(message, Keep.FIFO if address.asked else Keep.NEVER)

    def _log_refusal(self, nack: Nack) -> None:
        now_ns = self._clock.now_ns()
        if self._logged_ns is not None and now_ns - self._logged_ns < _LOG_EVERY_NS:
            self._unlogged += 1
            return
        log.warning(
            "command=%s id=%s refused=%s detail=%r unlogged=%d",
            nack.name, nack.id, nack.reason, nack.detail[:200], self._unlogged,
        )  # fmt: skip
        self._logged_ns, self._unlogged = now_ns, 0
