"""Ask the operating system what it may take for ever to answer, without waiting on the event loop.

Name resolution and files on a dead network share have no other way than a blocking call. Each asker has at most one
thread, a daemon thread, so that a call that hangs holds up nothing, our exit neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Aside(Generic[T]):
    """Makes one kind of blocking call on at most one thread; while an old call hangs, no new one is made."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pending: asyncio.Future[T] | None = None

    async def answer(self, call: Callable[[], T]) -> T:
        """Return what `call` returns, or raise its OSError; it may raise no other.

        When the waiting is cancelled, the call goes on, and whoever asks next gets its answer.
        """
        if self._pending is None:
            self._pending = self._start(call)
        pending = self._pending
        try:
            return await asyncio.shield(pending)
        finally:
            if pending.done():
                self._pending = None

    def _start(self, call: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(outcome: Callable[[], None]) -> None:
            if not answer.done():
                outcome()

        def run() -> None:
            outcome: Callable[[], None]
            try:
                found = call()
            except OSError as error:
                fault = error

                def outcome() -> None:
                    answer.set_exception(fault)
                    answer.exception()  # nobody may be waiting any more: that is no bug
            else:

                def outcome() -> None:
                    answer.set_result(found)

            with contextlib.suppress(RuntimeError):  # the loop is closed: the program has ended meanwhile
                loop.call_soon_threadsafe(settle, outcome)

        threading.Thread(target=run, name=self._name, daemon=True).start()
        return answer
