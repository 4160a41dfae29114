"""Take a loop's results and pass them on without ever making the loop wait.

`deliver` writes the record down at once and returns; what a slow or broken place cannot take is dropped, oldest first,
and counted. Nothing a sink meets ends the loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.config import JsonLinesSink, MqttSink
from edgeinfer.pipeline.off_thread import off_thread
from edgeinfer.pipeline.record import Delivery, encode_record

log = logging.getLogger(__name__)

MAX_WAITING_LINES = 256
MAX_WAITING_BYTES = 4 << 20
RETRY_NS = 5 * NS_PER_S
"""After a failed write the file is left alone for this long; meanwhile the newest lines wait."""
_FLUSH_S = 2.0


@dataclass(frozen=True, slots=True)
class SinkSnapshot:
    """How a sink stands."""

    kind: str
    delivered: int
    dropped: int
    problem: str = ""


class Sink(Protocol):
    """A place for results. Loop thread only."""

    def deliver(self, delivery: Delivery) -> None:
        """Take what became of one frame. Never blocks, never raises, keeps nothing of the result's memory."""
        ...

    async def run(self) -> None:
        """Do what has to go on beside `deliver`, for ever; when cancelled, pass on what waits within 2 s."""
        ...

    def snapshot(self) -> SinkSnapshot:
        """Return how it stands."""
        ...


class MqttResults:
    """Publishes each record to one topic. While there is no broker they are lost: a result is news or nothing."""

    def __init__(self, section: MqttSink, *, topic: str, send: Callable[[str, bytes], None]) -> None:
        """Publish by `send(topic, payload)`, which never blocks and counts what it cannot send."""
        self._outputs = section.outputs
        self._topic = topic
        self._send = send
        self._delivered = 0

    def deliver(self, delivery: Delivery) -> None:
        """Publish one record."""
        self._send(self._topic, encode_record(delivery, self._outputs))
        self._delivered += 1

    async def run(self) -> None:
        """Nothing goes on beside `deliver`."""

    def snapshot(self) -> SinkSnapshot:
        """Return how it stands; what the link dropped is the link's to count."""
        return SinkSnapshot("mqtt", self._delivered, 0)


class JsonLines:
    """Appends each record as a line to a file; at `max_bytes` it becomes `FILE.1` and a new one begins.

    So at most twice `max_bytes` are used. Lines are written whole or not at all, and in the storage thread.
    """

    def __init__(self, section: JsonLinesSink, *, clock: Clock, storage: Executor) -> None:
        self._outputs = section.outputs
        self._file = _RotatingFile(section.path, section.max_bytes)
        self._clock = clock
        self._storage = storage
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._filled = asyncio.Event()
        self._delivered = 0
        self._dropped = 0
        self._problem = ""
        self._retry_ns = 0

    def deliver(self, delivery: Delivery) -> None:
        """Queue one record; when 256 records or 4 MiB wait, the oldest are dropped."""
        line = encode_record(delivery, self._outputs) + b"\n"
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        self._trim()
        self._filled.set()

    async def run(self) -> None:
        """Write what was queued, for ever."""
        try:
            while True:
                await self._filled.wait()
                if (left_ns := self._retry_ns - self._clock.now_ns()) > 0:
                    await asyncio.sleep(left_ns / NS_PER_S)
                await self._write()
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_S):
                    await self._write()
                    await off_thread(self._storage, self._file.close)
            self._dropped += len(self._waiting)
            self._waiting.clear()

    def snapshot(self) -> SinkSnapshot:
        """Return how it stands."""
        return SinkSnapshot("jsonl", self._delivered, self._dropped, self._problem)

    async def _write(self) -> None:
        lines = list(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._filled.clear()
        written, problem = await off_thread(self._storage, self._file.append, lines)
        self._delivered += written
        if problem:
            self._retry_ns = self._clock.now_ns() + RETRY_NS
            for line in reversed(lines[written:]):
                self._waiting.appendleft(line)
                self._waiting_bytes += len(line)
            self._filled.set()
            self._trim()
            if problem != self._problem:
                log.warning("sink failed path=%s problem=%r dropped=%d", self._file.path, problem, self._dropped)
        self._problem = problem

    def _trim(self) -> None:
        while len(self._waiting) > MAX_WAITING_LINES or self._waiting_bytes > MAX_WAITING_BYTES:
            self._waiting_bytes -= len(self._waiting.popleft())
            self._dropped += 1


class _RotatingFile:
    """The file itself. Storage thread only, one call at a time."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._descriptor = -1
        self._size = 0

    def append(self, lines: list[bytes]) -> tuple[int, str]:
        """Write the lines in order; return how many were written whole, and what went wrong."""
        written = 0
        try:
            for line in lines:
                if self._descriptor < 0:
                    self._open()
                if self._size and self._size + len(line) > self._max_bytes:
                    self._rotate()
                self._write_whole(line)
                written += 1
        except OSError as error:
            self.close()
            return written, f"{self.path} cannot be written: {error.strerror}"
        return written, ""

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o644)
        self._size = os.fstat(self._descriptor).st_size
        if self._size and os.pread(self._descriptor, 1, self._size - 1) != b"\n":  # a power cut left half a line
            self._write_whole(b"\n")

    def _rotate(self) -> None:
        self.close()
        os.replace(self.path, f"{self.path}.1")  # noqa: PTH105
        self._open()

    def _write_whole(self, line: bytes) -> None:
        written = os.write(self._descriptor, line)
        if written < len(line):
            os.ftruncate(self._descriptor, self._size)
            raise OSError(28, "no space left on device")
        self._size += written
