"""Run a child process that writes frames (a camera, a microphone, a decoder) and keep it running.

It is restarted with a growing, jittered, capped wait whenever it ends or breaks its framing, and it dies with the
daemon, however that ends. Its output is always read, so it never stalls; only the newest frame is kept. What it says on
stderr goes to the log, a few lines a minute.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import random
import signal
import subprocess
from typing import IO

from edgeinfer.clock import NS_PER_MS, NS_PER_S, Clock, sleep_until
from edgeinfer.config import CommandSource
from edgeinfer.pipeline.frame import Frame, NewestFrame, SourceSnapshot
from edgeinfer.pipeline.framing import Framer, FramingError, make_framer
from edgeinfer.worker.lineage import Child, die_with_parent

log = logging.getLogger(__name__)

FIRST_WAIT_NS = 500 * NS_PER_MS
LONGEST_WAIT_NS = 30 * NS_PER_S
STABLE_NS = 30 * NS_PER_S
"""A child that lived this long was well: the next failure counts as the first again."""
_GRACE_S = 1.0
"""From SIGTERM to SIGKILL."""
_READ_BYTES = 1 << 18
_LOG_LINES_PER_MINUTE = 10
_LOG_LINE_BYTES = 300


class CommandFrames:
    """A `Source` over a child's standard output."""

    def __init__(self, section: CommandSource, *, name: str, clock: Clock, dice: random.Random | None = None) -> None:
        self._section = section
        self._name = name
        self._clock = clock
        self._dice = dice or random.Random()  # noqa: S311 - jitter
        self._newest = NewestFrame()
        self._content_type = section.content_type or _default_content_type(section.framing)
        self._number = 0
        self._restarts = 0
        self._lost = 0
        self._problem = ""

    async def run(self) -> None:
        """Keep the child running, for ever; end it when cancelled."""
        failures = 0
        while True:
            started_ns = self._clock.now_ns()
            self._problem = await self._session()
            now_ns = self._clock.now_ns()
            failures = 1 if now_ns - started_ns >= STABLE_NS else failures + 1
            wait_ns = wait_before_restart_ns(failures, self._dice)
            self._restarts += 1
            log.warning(
                "source ended loop=%s problem=%r restarts=%d wait_ms=%d",
                self._name, self._problem, self._restarts, wait_ns // NS_PER_MS,
            )  # fmt: skip
            await sleep_until(now_ns + wait_ns, self._clock)

    async def next_frame(self) -> Frame | None:
        """Return the newest frame, waiting for one for as long as it takes."""
        return await self._newest.take()

    def snapshot(self) -> SourceSnapshot:
        """Return how it stands."""
        skipped = self._newest.replaced + self._lost
        return SourceSnapshot(self._newest.taken, skipped, self._restarts, self._problem)

    async def _session(self) -> str:
        """Run the child once; return why it ended, for people."""
        try:
            framer = make_framer(self._section)
            process = subprocess.Popen(  # noqa: ASYNC220 - returns as soon as the child has been started
                self._section.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - two system calls, no lock
            )
        except (OSError, subprocess.SubprocessError, ValueError, FramingError) as error:
            return f"{self._section.argv[0]} cannot be started: {getattr(error, 'strerror', None) or error}"
        assert process.stdout is not None
        assert process.stderr is not None
        child = Child(process.pid, asyncio.get_running_loop())
        problem = ""
        try:
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(self._log_errors(process.stderr), name=f"stderr[{self._name}]")
                problem = await self._read_frames(process.stdout, framer)
                await asyncio.wait({child.ended}, timeout=0 if problem else _GRACE_S)  # it says how it ended
                await _end(child)
                listening.cancel()
        finally:
            await _end(child)
            process.returncode = 0  # reaped by `child`; Popen must not look for it
            self._lost += framer.pending_bytes > 0
        return problem or f"{self._section.argv[0]} {child.ended.result()}"

    async def _read_frames(self, stdout: IO[bytes], framer: Framer) -> str:
        """Read until the output ends; return what is wrong with it, if anything."""
        reader, transport = await _reader(stdout)
        first = True
        try:
            while data := await reader.read(_READ_BYTES):
                for frame in framer.feed(data):
                    self._problem = ""
                    self._number += 1
                    self._newest.put(
                        Frame(frame, self._content_type, self._clock.now_ns(), f"#{self._number}", sequence_start=first)
                    )
                    first = False
        except FramingError as error:
            return f"{self._section.argv[0]}: {error} (framing = {self._section.framing!r})"
        finally:
            transport.close()
        return ""

    async def _log_errors(self, stderr: IO[bytes]) -> None:
        reader, transport = await _reader(stderr)
        budget, window_ns, unsaid = _LOG_LINES_PER_MINUTE, self._clock.now_ns(), 0
        try:
            while text := await reader.read(4096):
                for line in text.splitlines():
                    if self._clock.now_ns() - window_ns >= 60 * NS_PER_S:
                        budget, window_ns = _LOG_LINES_PER_MINUTE, self._clock.now_ns()
                    if budget == 0:
                        unsaid += 1
                        continue
                    budget -= 1
                    shown = line[:_LOG_LINE_BYTES].decode("utf-8", "replace")
                    log.info("source says loop=%s line=%r unsaid=%d", self._name, shown, unsaid)
                    unsaid = 0
        finally:
            transport.close()


def wait_before_restart_ns(failures: int, dice: random.Random) -> int:
    """Return the wait after that many failures in a row, at least one: doubling, capped, jittered down to a half."""
    full_ns = min(LONGEST_WAIT_NS, FIRST_WAIT_NS << min(failures - 1, 16))
    return round(full_ns * dice.uniform(0.5, 1.0))


def _default_content_type(framing: str) -> str:
    return {"jpeg": "image/jpeg", "lines": "text/plain"}.get(framing, "application/octet-stream")


async def _reader(pipe: IO[bytes]) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_READ_BYTES)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader, transport


async def _end(child: Child) -> None:
    """End the child and whatever it started in its session: politely, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not child.is_running:
            break
        try:
            os.killpg(child.pid, number)
        except (ProcessLookupError, PermissionError):
            child.signal(number)
        await asyncio.wait({child.ended}, timeout=_GRACE_S)
    else:
        return
    try:
        os.killpg(child.pid, signal.SIGKILL)  # what the child left behind in its session
    except (ProcessLookupError, PermissionError):
        return
