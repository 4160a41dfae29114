"""A command plane on a fake link, a fake daemon and virtual time."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, TypeVar

from edgeinfer.clock import LoopClock
from edgeinfer.control.commands import Answer, Refused
from edgeinfer.control.journal import Journal
from edgeinfer.control.plane import CommandPlane
from edgeinfer.errors import BudgetExceeded
from edgeinfer.mqtt.message import Keep, Message
from edgeinfer.mqtt.stamp import Stamper
from edgeinfer.mqtt.topics import Topics

T = TypeVar("T")
TOPICS = Topics("edgeinfer", "lab", "cam1")
REPLY_TO = "edgeinfer/v1/lab/operator/reply"
WALL_S = dt.datetime(2026, 5, 1, 12, 0, 0, tzinfo=dt.UTC).timestamp()


class InlineStorage(Executor):
    """Runs what is submitted at once: virtual time has no threads to wait for."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001
            future.set_exception(error)
        return future


class FakeLink:
    """Keeps what was sent, and for whom it would be kept while offline."""

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[[Message], None]] = {}
        self.sent: list[tuple[Message, Keep]] = []

    def subscribe(self, topic_filter: str, handler: Callable[[Message], None], *, qos: int = 1) -> None:
        self.handlers[topic_filter] = handler

    def send(self, message: Message, keep: Keep) -> None:
        self.sent.append((message, keep))


class FakeDaemon:
    """Actions that note what was done; a model named `big` doesn't fit, `slow` takes 30 s, `bug` raises."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.state: dict[str, Any] = {"p99_ms": float("nan")}

    async def get_state(self) -> Answer:
        self.done.append(("get-state",))
        return self.state

    async def set_loop(
        self, loop: str, *, enabled: bool | None, period_ns: int | None, deadline_ns: int | None
    ) -> Answer:
        if loop != "camera":
            return Refused("unknown_loop", f"no loop {loop!r}; there are camera")
        self.done.append(("set-loop", loop, enabled, period_ns, deadline_ns))
        return {"loop": loop}

    async def load(self, model: str, *, version: str) -> Answer:
        if model == "big":
            raise BudgetExceeded("big", needed_bytes=2 << 20, free_bytes=1 << 20, ceiling_bytes=4 << 20)
        if model == "bug":
            raise KeyError(model)
        await asyncio.sleep({"slow": 30, "endless": 1e6}.get(model, 0))
        self.done.append(("load", model, version))
        return {"model": model}

    async def unload(self, model: str) -> Answer:
        self.done.append(("unload", model))
        return {}


class Bench:
    """One run of the plane; several in a row share the journal's file, as restarts do."""

    def __init__(self, journal: Path | None, *, synced: bool = True) -> None:
        loop = asyncio.get_running_loop()
        self.link, self.daemon = FakeLink(), FakeDaemon()
        start_s = loop.time()

        def wall_s() -> float:
            return WALL_S + loop.time() - start_s

        clock = LoopClock(loop)
        self.journal = Journal(journal, InlineStorage())
        self.plane = CommandPlane(
            self.link, TOPICS, self.daemon, journal=self.journal, clock=clock, wall_s=wall_s,
            stamper=Stamper(clock, boot="b", wall_s=wall_s, synced=lambda: synced),
        )  # fmt: skip
        self.task = asyncio.create_task(self.plane.run())

    def deliver(
        self, verb: str, payload: bytes | dict[str, Any], *, reply_to: str | None = REPLY_TO,
        correlation: bytes | None = b"c1", retain: bool = False, expiry_s: int | None = None,
    ) -> None:  # fmt: skip
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        message = Message(
            TOPICS.command("get-state").replace("get-state", verb), data, qos=1, retain=retain,
            response_topic=reply_to, correlation=correlation, expiry_s=expiry_s,
        )  # fmt: skip
        [handler] = self.link.handlers.values()
        handler(message)

    async def settle(self, seconds: float = 0.001) -> None:
        await asyncio.sleep(seconds)

    def take(self) -> list[dict[str, Any]]:
        """Return the replies since the last call."""
        replies = [json.loads(message.payload) for message, _ in self.link.sent]
        self.link.sent.clear()
        return replies

    async def ask(self, verb: str, payload: bytes | dict[str, Any], **how: Any) -> dict[str, Any]:
        """Deliver one command and return its only reply."""
        self.deliver(verb, payload, **how)
        await self.settle()
        [reply] = self.take()
        return reply

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


def with_bench(
    test: Callable[[Bench], Awaitable[T]], journal: Path | None = None, *, synced: bool = True
) -> Callable[[], Awaitable[T]]:
    """Return a coroutine function that runs `test` on a fresh bench."""

    async def main() -> T:
        bench = Bench(journal, synced=synced)
        await bench.settle()
        try:
            return await test(bench)
        finally:
            await bench.stop()

    return main
