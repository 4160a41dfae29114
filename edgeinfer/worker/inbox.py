"""The worker's reader thread: takes every message off the channel, and acts at once on those that cannot wait.

Worker's side. While the main thread is inside ONNX Runtime, this one maps slots, stops the current run when asked and
queues the rest, in order. When the channel ends, the process ends here, whatever the main thread is doing. What the
queued messages do is `main`'s.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from edgeinfer.errors import ProtocolError
from edgeinfer.worker.channel import ChannelClosed, ProcessEnd, close_all
from edgeinfer.worker.fault import CANCELLED, Fault
from edgeinfer.worker.messages import (
    Attach,
    Cancel,
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
"""Messages that wait for the main thread. The daemon sends one run ahead, so more means that it is broken."""
_LOGS_PER_S: Final = 20
_EXIT_PROTOCOL: Final = 76  # EX_PROTOCOL

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
        if self.is_cancelled(run):
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
    """What the reader thread has read and the main thread has not yet done. Bounded; full is fatal."""

    def __init__(self, channel: Channel) -> None:
        self.runs = CurrentRun()
        self.slots = MappedSlots()
        self._channel = channel
        self._work: queue.Queue[Work] = queue.Queue(_INBOX)
        self._grants: queue.Queue[Grant] = queue.Queue(1)

    def start(self) -> None:
        """Start the reader thread; it lives as long as the process."""
        threading.Thread(target=self._read_for_ever, name="channel-reader", daemon=True).start()

    def next(self) -> Work:
        """Wait for the main thread's next piece of work."""
        return self._work.get()

    def next_grant(self) -> Grant:
        """Wait for the answer to an `Oversize`."""
        return self._grants.get()

    def _read_for_ever(self) -> None:
        status = _EXIT_PROTOCOL
        try:
            while True:
                message, fds = self._channel.receive()
                self._take(message, fds)
                close_all(fds)
        except ChannelClosed:
            status = 0
        except (ProtocolError, msgspec.MsgspecError, OSError, IndexError, queue.Full) as error:
            self._channel.send(Log(logging.ERROR, f"worker ends on its channel: {type(error).__name__}: {error}"))
        finally:
            os._exit(status)

    def _take(self, message: ToWorker, fds: list[int]) -> None:
        match message:
            case Cancel(run):
                self.runs.cancel(run)
            case Attach(slot, size_bytes):
                self.slots.attach(slot, fds.pop(), size_bytes)
            case Detach(slot):
                self.slots.detach(slot)
            case Grant():
                self._grants.put_nowait(message)
            case Load(spec_bytes):
                with mmap.mmap(fds[0], spec_bytes, access=mmap.ACCESS_READ) as area:
                    self._work.put_nowait(msgspec.msgpack.decode(area[:], type=LoadSpec))
            case Run():
                self._work.put_nowait((message, time.monotonic_ns()))
            case _:
                self._work.put_nowait(message)


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
