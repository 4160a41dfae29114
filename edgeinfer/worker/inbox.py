"""What a worker is told: the main thread's next piece of work, and meanwhile, what it has to stop.

Worker's side. The main thread reads the channel itself, in order, and runs what comes: a run passes through no other
thread. Only cancels can't wait until it reads again: they come over a pipe of their own (`cancels`), on which a second
thread sleeps. When that pipe ends the daemon is gone, and so is this process, whatever the main thread is doing. What
the work is, is `main`'s.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from edgeinfer.errors import ProtocolError
from edgeinfer.worker.cancels import read_cancels
from edgeinfer.worker.channel import ProcessEnd, close_all
from edgeinfer.worker.fault import CANCELLED, Fault
from edgeinfer.worker.messages import (
    Attach,
    Detach,
    ForgetStream,
    FromWorker,
    Grant,
    Load,
    LoadSpec,
    Log,
    Run,
    Shrink,
    Stop,
    ToWorker,
)
from edgeinfer.worker.slot import MappedSlots

_INBOX: Final = 8
"""Messages that may come while a run waits for its `Grant`: the daemon sends one run ahead, so more is nonsense."""
_LOGS_PER_S: Final = 20

Channel = ProcessEnd[ToWorker, FromWorker]
Work = tuple[Run, int] | LoadSpec | ForgetStream | Shrink | Stop
"""What the main thread does; a run comes with the moment at which it was received."""


class CurrentRun:
    """Which run is under way and which were cancelled: what both threads share. Locked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._finished = 0
        self._stop: Callable[[], None] | None = None
        self._cancelled: set[int] = set()

    def cancel(self, run: int) -> None:
        """Stop `run`, now or before it begins. A run that has finished is left alone."""
        with self._lock:
            if run <= self._finished:
                return
            self._cancelled.add(run)
            if run == self._under_way and self._stop is not None:
                self._stop()

    def begin(self, run: int, stop: Callable[[], None]) -> None:
        """Say that `run` is under way, and how to stop it. Runs come in ascending order.

        Raises:
            Fault: `cancelled`, before it began.
        """
        with self._lock:
            self._under_way, self._stop = run, stop
            is_cancelled = run in self._cancelled
        if is_cancelled:
            raise Fault(CANCELLED, "stopped before it began")

    def is_cancelled(self, run: int) -> bool:
        """Whether the daemon wants `run` stopped."""
        with self._lock:
            return run in self._cancelled

    def finish(self, run: int) -> None:
        """Say that `run` has ended, in whatever way."""
        with self._lock:
            self._finished, self._stop = run, None
            self._cancelled.discard(run)


class Inbox:
    """What the daemon has sent and the main thread has not yet done. Main thread only."""

    def __init__(self, channel: Channel) -> None:
        self.runs = CurrentRun()
        self.slots = MappedSlots()
        self._channel = channel
        self._work: deque[Work] = deque()

    def next(self) -> Work:
        """Wait for the next piece of work.

        Raises:
            ProtocolError: the daemon sent nonsense; `ChannelClosed` when it is gone.
            OSError: what it sent cannot be mapped.
        """
        while not self._work:
            self._take(*self._channel.receive())
        return self._work.popleft()

    def next_grant(self) -> Grant:
        """Wait for the answer to an `Oversize`; what else comes meanwhile is for later. Raises as `next`."""
        while True:
            message, fds = self._channel.receive()
            if isinstance(message, Grant):
                close_all(fds)
                return message
            if len(self._work) >= _INBOX:
                raise ProtocolError(f"{_INBOX} messages came before the grant that was asked for")
            self._take(message, fds)

    def _take(self, message: ToWorker, fds: list[int]) -> None:
        match message:
            case Run():
                self._work.append((message, time.monotonic_ns()))
            case Attach(slot, size_bytes) if fds:
                self.slots.attach(slot, fds.pop(), size_bytes)
            case Detach(slot):
                self.slots.detach(slot)
            case Load(spec_bytes) if len(fds) > 1:
                self._watch_cancels(fds.pop())
                with mmap.mmap(fds[0], spec_bytes, access=mmap.ACCESS_READ) as area:
                    self._work.append(msgspec.msgpack.decode(area[:], type=LoadSpec))
            case ForgetStream() | Shrink() | Stop():
                self._work.append(message)
            case _:
                raise ProtocolError(f"{type(message).__name__} came when it makes no sense")
        close_all(fds)

    def _watch_cancels(self, fd: int) -> None:
        """Start the thread that stops runs; it lives as long as the process."""

        def watch() -> None:
            try:
                read_cancels(fd, self.runs.cancel)
            finally:
                os._exit(0)

        threading.Thread(target=watch, name="cancel-reader", daemon=True).start()


class LogLines:
    """Sends lines to the daemon's journal, at most `_LOGS_PER_S` each second; the rest is counted and dropped."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._second = 0
        self._sent = 0
        self._dropped = 0

    def __call__(self, level: int, text: str) -> None:
        """Send a line; never raises, since it is called from inside ONNX Runtime."""
        second = time.monotonic_ns() // 1_000_000_000
        if second != self._second:
            self._second, self._sent = second, 0
        if self._sent >= _LOGS_PER_S:
            self._dropped += 1
            return
        if self._dropped:
            text, self._dropped = f"{text} ({self._dropped} lines before it were dropped)", 0
        self._sent += 1
        try:
            self._channel.send(Log(level, text[:1000]))
        except ProtocolError:
            return  # the daemon is gone, and so are we
