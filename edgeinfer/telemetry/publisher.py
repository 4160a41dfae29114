"""Tell the fleet how the device stands: birth, state, reports, events, farewell.

Owns what was told last and the window since the last report. What the records say is `report`, what counts as an event
is `events`, how long a message waits for the broker is the link's. Events and changes also go to the log, so a device
without a broker is not mute.

| record | when | made while offline |
|---|---|---|
| status, retained | at each connect; offline by will or farewell | no: the next birth says it |
| state, retained | at each connect; when it changes, at most once a second; once a minute at least | no: the same |
| report | every period while connected | no: the first one after an outage covers all of it |
| event | when it happens | yes; the link holds them in order and drops the oldest |
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.mqtt.envelope import JSON_CONTENT_TYPE, Event, Record, State, Status, encode
from edgeinfer.mqtt.message import Keep, Message
from edgeinfer.mqtt.stamp import Stamp, Stamper
from edgeinfer.mqtt.topics import Topics
from edgeinfer.request import Outcome
from edgeinfer.telemetry.events import Detection, Finding, detect
from edgeinfer.telemetry.report import Identity, Recent, build_report, build_state, build_status
from edgeinfer.telemetry.snapshot import OutcomeWindow, Snapshot

log = logging.getLogger(__name__)

_TICK_NS = NS_PER_S
"""How often a snapshot is taken, at least."""
_STATE_EVERY_NS = 60 * NS_PER_S
"""The retained state is never older than this, temperature included."""
_SHORTEST_NS = NS_PER_S // 5
"""Between two looks that were asked for by `wake`."""


class Outlet(Protocol):
    """What the publisher needs of an `MqttLink`."""

    @property
    def connected(self) -> bool:
        """Whether messages go out right now."""
        ...

    def send(self, message: Message, keep: Keep) -> None:
        """Publish, or do as `keep` says; never blocks."""
        ...

    def on_connected(self, callback: Callable[[], None]) -> None:
        """Have `callback` called at each connection."""
        ...


def make_will(topics: Topics, stamper: Stamper, version: str) -> Message:
    """Return the message that the broker publishes when the device is lost: retained, as the birth is."""
    status = Status(online=False, stamp=stamper.now(), reason="connection_lost", version=version)
    return _message(topics.status, status, retain=True)


class Publisher:
    """The device's voice. Loop thread only; `run` is its one task, `observe` hears of every outcome."""

    def __init__(
        self,
        link: Outlet | None,
        topics: Topics,
        *,
        snapshot: Callable[[], Snapshot],
        identity: Identity,
        stamper: Stamper,
        clock: Clock,
        period_ns: int,
    ) -> None:
        """Without a link (None), events only go to the log."""
        self._link = link
        self._topics = topics
        self._snapshot = snapshot
        self._identity = identity
        self._stamper = stamper
        self._clock = clock
        self._period_ns = period_ns
        self._window = OutcomeWindow(clock.now_ns())
        self._detection = Detection()
        self._previous: Snapshot | None = None
        self._told: tuple[State, int] | None = None
        """The last state that went out, without what moves all the time, and when."""
        self._asked = asyncio.Event()
        self._offline_reason = ""
        """Why we have said goodbye; empty before that."""
        if link is not None:
            link.on_connected(self._birth)

    def observe(self, outcome: Outcome) -> None:
        """Count an outcome towards the next report. Call while its result is still leased."""
        self._window.add(outcome)

    def wake(self) -> None:
        """Look at once for what has changed, instead of at the next tick."""
        self._asked.set()

    async def run(self) -> None:
        """Look, tell and wait, for ever."""
        report_ns = self._clock.now_ns() + self._period_ns
        tick_ns = min(_TICK_NS, self._period_ns)
        while True:
            snapshot = self._look()
            if self._link is not None and self._link.connected:
                self._tell_state(snapshot)
                if (now_ns := self._clock.now_ns()) >= report_ns:
                    self._tell_report(snapshot)
                    on_time_ns = report_ns + self._period_ns
                    report_ns = on_time_ns if on_time_ns > now_ns else now_ns + self._period_ns
            await self._pause(tick_ns)

    def status(self) -> dict[str, Any]:
        """Return what local apps and `get-state` are told: the newest state and report as JSON values."""
        snapshot = self._snapshot()
        return build_status(self._state(snapshot), build_report(snapshot, self._identity, self._now(), self._recent()))

    def farewell(self, reason: str = "stopping") -> None:
        """Hand the link the last words: call before the link is cancelled, which sends them.

        A connection that is made after this is told that we are leaving, not that we are there.
        """
        snapshot = self._look()
        self._offline_reason = reason
        if self._link is not None:
            self._tell_report(snapshot, qos=1)
            self._send(self._topics.state, self._state(snapshot), Keep.LATEST, retain=True)
            self._tell_status()

    async def _pause(self, tick_ns: int) -> None:
        """Wait for a tick or, when `wake` was called, for the shortest pause."""
        shortest_ns = min(_SHORTEST_NS, tick_ns)
        await asyncio.sleep(shortest_ns / NS_PER_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout((tick_ns - shortest_ns) / NS_PER_S):
                await self._asked.wait()
        self._asked.clear()

    def _look(self) -> Snapshot:
        """Take a snapshot and tell the events since the last one."""
        snapshot = self._snapshot()
        self._detection, findings = detect(self._previous or snapshot, snapshot, self._detection)
        self._previous = snapshot
        for finding in findings:
            self._tell_event(finding)
        return snapshot

    def _birth(self) -> None:
        """Say that we are there; the link calls it at each connection, when the will stands."""
        self._tell_status()
        self._told = None
        self._tell_state(self._snapshot())

    def _tell_status(self) -> None:
        reason, version = self._offline_reason, self._identity.version
        status = Status(online=not reason, stamp=self._now(), reason=reason, version=version)
        self._send(self._topics.status, status, Keep.LATEST, retain=True)

    def _tell_state(self, snapshot: Snapshot) -> None:
        state, now_ns = self._state(snapshot), self._clock.now_ns()
        steady = _steady(state)
        if self._told is not None:
            told, told_ns = self._told
            due_ns = told_ns + (_TICK_NS if steady != told else _STATE_EVERY_NS)
            if now_ns < due_ns:
                return
        self._told = (steady, now_ns)
        self._send(self._topics.state, state, Keep.LATEST, retain=True)

    def _tell_report(self, snapshot: Snapshot, *, qos: int = 0) -> None:
        report = build_report(snapshot, self._identity, self._now(), self._recent())
        if not report.balanced:
            log.error("accounting identity=broken total=%s", report.total)
        self._send(self._topics.report, report, Keep.LATEST, qos=qos)
        self._window.restart(self._clock.now_ns())

    def _tell_event(self, finding: Finding) -> None:
        log.info("event=%s detail=%r", finding.kind, finding.detail)
        stamp, fields = self._now(), dict(finding.fields)
        if finding.since_ns is not None:
            ago = dt.timedelta(microseconds=(stamp.mono_ns - finding.since_ns) / 1000)
            since = dt.datetime.fromisoformat(stamp.at) - ago
            fields["since"] = since.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        event = Event(stamp=stamp, kind=finding.kind, detail=finding.detail, fields=fields)
        self._send(self._topics.event(finding.kind), event, Keep.FIFO)

    def _state(self, snapshot: Snapshot) -> State:
        return build_state(snapshot, self._identity, self._now(), offload_open=self._detection.offload_open)

    def _recent(self) -> Recent:
        return Recent(*self._window.figures(self._clock.now_ns()))

    def _now(self) -> Stamp:
        return self._stamper.now()

    def _send(self, topic: str, record: Record, keep: Keep, *, retain: bool = False, qos: int = 1) -> None:
        if self._link is not None:
            self._link.send(_message(topic, record, retain=retain, qos=qos), keep)


def _message(topic: str, record: Record, *, retain: bool = False, qos: int = 1) -> Message:
    return Message(topic=topic, payload=encode(record), qos=qos, retain=retain, content_type=JSON_CONTENT_TYPE)


_NO_STAMP = Stamp(at="", clock_synced=False, boot="", mono_ns=0)


def _steady(state: State) -> State:
    """Return the state without what moves all the time: a change of the rest is worth publishing at once."""
    thermal = msgspec.structs.replace(
        state.thermal, temp_c=None, reason="", duty_cycle=round(state.thermal.duty_cycle, 1)
    )
    memory = msgspec.structs.replace(
        state.memory, reserved_bytes=0, peak_reserved_bytes=0, used_bytes=None, peak_used_bytes=None, held_bytes={},
        why_lowered="",
    )  # fmt: skip
    return msgspec.structs.replace(state, stamp=_NO_STAMP, thermal=thermal, memory=memory)
