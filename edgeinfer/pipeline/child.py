"""Run a child process that writes to its standard output (a camera, a microphone, a decoder) and keep it running.

It is restarted with a growing, jittered, capped wait whenever it ends, breaks its framing or falls silent, and it dies
with the daemon, however that ends. Its output is always read, so it does not stall; one that writes so fast that its
frames cost more than a share of a core is held back by its pipe, which is told. What it says on stderr goes to the
log, a few lines a minute, and into the problem that is told when it ends; secrets never do. How it is started is the
caller's `prepare`, asked anew each time; what becomes of its output is the caller's `take`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import os
import random
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import IO

from edgeinfer.clock import NS_PER_MS, NS_PER_S, Clock, sleep_until
from edgeinfer.pipeline.cpu_share import SHARE, CpuShare
from edgeinfer.pipeline.frame import SourceError
from edgeinfer.pipeline.framing import Framer, FramingError
from edgeinfer.worker.lineage import Child, die_with_parent

log = logging.getLogger(__name__)

FIRST_WAIT_NS = 500 * NS_PER_MS
LONGEST_WAIT_NS = 30 * NS_PER_S
STABLE_NS = 30 * NS_PER_S
"""A child that lived this long was well: the next failure counts as the first again."""
GRACE_S = 1.0
"""From SIGTERM to SIGKILL."""
_READ_BYTES = 1 << 16
"""At once: a hundredth of a second of work for the smallest frames."""
_HELD_BACK_NS = 5 * NS_PER_S
"""A child that was not held back for so long is no problem any more."""
_PIPE_BYTES = 1 << 20
"""Room between the child and us, where the system grants it: it does not stall while the loop is busy."""
_LOG_LINES_PER_MINUTE = 10
_LOG_LINE_BYTES = 300
_LONGEST_LINE_BYTES = 8192
_LAST_WORDS = 2
_LAST_WORDS_NS = 10 * NS_PER_S
"""What was said longer ago is not why the child ended."""
_ADDRESS = re.compile(r" @ 0x[0-9a-f]+\]")


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a child."""

    argv: tuple[str, ...]
    stdin: bytes = b""
    """What it reads from its standard input: unlike `argv`, nobody else on the machine sees it."""
    secrets: tuple[str, ...] = ()
    """Texts that are cut out of everything it says."""
    package: str = ""
    """The Debian package that its program comes with, for people who have to install it."""
    silence_ns: int | None = None
    """It hangs when it has written nothing for so long, and is started again; None: it may be silent for ever."""
    fatal: tuple[tuple[str, str], ...] = ()
    """Words on its stderr after which its output is worth nothing, each with what to do about it."""


class KeptChild:
    """One child process, kept running by `run`. Loop thread only."""

    def __init__(
        self,
        name: str,
        *,
        prepare: Callable[[], Awaitable[Launch]],
        framer: Callable[[], Framer],
        take: Callable[[list[bytes], Framer, bool], None],
        framing: str,
        clock: Clock,
        dice: random.Random | None = None,
    ) -> None:
        """Make one for the loop `name`.

        `prepare` says how to start it this time, or raises `SourceError`. `take` gets the frames that came at once,
        the framer that found them, and whether they are the first of this child. `framing` is what people call it.
        """
        self._name = name
        self._prepare = prepare
        self._framer = framer
        self._take = take
        self._framing = framing
        self._clock = clock
        self._dice = dice or random.Random()  # noqa: S311 - jitter
        self._last_words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._spoke_ns = 0
        self.restarts = 0
        self.lost = 0
        """Frames that had begun when the output ended."""
        self.problem = ""
        """What is wrong right now, in words; empty when nothing is."""

    async def run(self) -> None:
        """Keep the child running, for ever; end it when cancelled."""
        failures = 0
        while True:
            started_ns = self._clock.now_ns()
            self.problem = await self._session()
            now_ns = self._clock.now_ns()
            failures = 1 if now_ns - started_ns >= STABLE_NS else failures + 1
            wait_ns = wait_before_restart_ns(failures, self._dice)
            self.restarts += 1
            log.warning(
                "source ended loop=%s problem=%r restarts=%d wait_ms=%d",
                self._name, self.problem, self.restarts, wait_ns // NS_PER_MS,
            )  # fmt: skip
            await sleep_until(now_ns + wait_ns, self._clock)

    async def _session(self) -> str:
        """Run the child once; return why it ended, for people."""
        try:
            launch = await self._prepare()
            framer = self._framer()
        except (SourceError, FramingError) as error:
            return str(error)
        program = launch.argv[0]
        try:
            process = _start(launch)
        except FileNotFoundError as error:
            remedy = f"; install it: apt-get install {launch.package}" if launch.package else ""
            return f"{program} cannot be started: {error.strerror}{remedy}"
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            return f"{program} cannot be started: {getattr(error, 'strerror', None) or error}"
        assert process.stdout is not None
        assert process.stderr is not None
        self._last_words.clear()
        child = Child(process.pid, asyncio.get_running_loop())
        problem = ""
        try:
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(self._listen(process.stderr, launch, child), name=f"stderr[{self._name}]")
                problem = await self._read_frames(process.stdout, framer, launch)
                await asyncio.wait({child.ended}, timeout=0 if problem else GRACE_S)  # it says how it ended
                await end(child)
                await asyncio.wait({listening}, timeout=GRACE_S)
                if not listening.cancel():
                    problem = problem or listening.result()
        finally:
            await end(child)
            process.returncode = 0  # reaped by `child`; Popen must not look for it
            self.lost += framer.pending_bytes > 0
        return problem or f"{program} {child.ended.result()}{self._said()}"

    async def _read_frames(self, stdout: IO[bytes], framer: Framer, launch: Launch) -> str:
        """Read until the output ends; return what is wrong with it, if anything."""
        silence_s = None if launch.silence_ns is None else launch.silence_ns / NS_PER_S
        first, share, held_back_ns = True, CpuShare(), 0
        held_back = (
            f"{launch.argv[0]} writes faster than its frames can be taken: it is held back to {SHARE:.0%} of a core"
        )
        async with _reading(stdout) as reader:
            try:
                while True:
                    async with asyncio.timeout(silence_s):
                        data = await reader.read(_READ_BYTES)
                    if not data:
                        return ""
                    began_ns, cpu_ns = self._clock.now_ns(), time.thread_time_ns()
                    if frames := framer.feed(data):
                        self.problem = held_back if began_ns < held_back_ns + _HELD_BACK_NS and held_back_ns else ""
                        self._take(frames, framer, first)
                        first = False
                    now_ns = self._clock.now_ns()
                    pause_ns = share.pause_ns(len(data), time.thread_time_ns() - cpu_ns, now_ns)
                    if pause_ns:
                        self.problem, held_back_ns = held_back, now_ns
                    await asyncio.sleep(pause_ns / NS_PER_S)  # also for 0: what is buffered would not let others in
            except TimeoutError:
                return f"{launch.argv[0]} has given nothing for {silence_s:g} s{self._said()}"
            except FramingError as error:
                return f"{launch.argv[0]}: {error} (framing = {self._framing!r})"

    async def _listen(self, stderr: IO[bytes], launch: Launch, child: Child) -> str:
        """Log what the child says, with measure; return what makes its output worthless, once it said so."""
        budget, window_ns, unsaid, fatal = _LOG_LINES_PER_MINUTE, self._clock.now_ns(), 0, ""
        async for raw in _lines(stderr):
            line = _without(raw, launch.secrets)
            now_ns = self._clock.now_ns()
            self._last_words.append(line[:_LOG_LINE_BYTES])
            self._spoke_ns = now_ns
            for words, remedy in launch.fatal:
                if words in line and not fatal:
                    fatal = f"{launch.argv[0]}: {line[:_LOG_LINE_BYTES]}: {remedy}"
                    child.signal(signal.SIGTERM)
            if now_ns - window_ns >= 60 * NS_PER_S:
                budget, window_ns = _LOG_LINES_PER_MINUTE, now_ns
            if budget == 0:
                unsaid += 1
                continue
            budget -= 1
            log.info("source says loop=%s line=%r unsaid=%d", self._name, line[:_LOG_LINE_BYTES], unsaid)
            unsaid = 0
        return fatal

    def _said(self) -> str:
        """Return the child's last words, if it said them lately."""
        if not self._last_words or self._clock.now_ns() - self._spoke_ns > _LAST_WORDS_NS:
            return ""
        return ": " + "; ".join(self._last_words)


def wait_before_restart_ns(failures: int, dice: random.Random) -> int:
    """Return the wait after that many failures in a row, at least one: doubling, capped, jittered down to a half."""
    full_ns = min(LONGEST_WAIT_NS, FIRST_WAIT_NS << min(failures - 1, 16))
    return round(full_ns * dice.uniform(0.5, 1.0))


async def end(child: Child) -> None:
    """End the child and whatever it started in its session: politely, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not child.is_running:
            break
        try:
            os.killpg(child.pid, number)
        except (ProcessLookupError, PermissionError):
            child.signal(number)
        await asyncio.wait({child.ended}, timeout=GRACE_S)
    else:
        return
    try:
        os.killpg(child.pid, signal.SIGKILL)  # what the child left behind in its session
    except (ProcessLookupError, PermissionError):
        return


def _start(launch: Launch) -> subprocess.Popen[bytes]:
    """Start the child, in a session of its own, dying with us.

    Raises:
        OSError, subprocess.SubprocessError, ValueError: it cannot be.
    """
    with _input(launch.stdin) as stdin:
        process = subprocess.Popen(
            launch.argv,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - two system calls, no lock
        )
    assert process.stdout is not None
    with contextlib.suppress(OSError):  # beyond what a user may have in pipes: the usual 64 KiB do, too
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return process


def _input(data: bytes) -> IO[bytes]:
    """Return a file to give a child as its standard input."""
    if not data:
        return open(os.devnull, "rb")  # noqa: PTH123
    file = os.fdopen(os.memfd_create("edgeinfer-stdin", os.MFD_CLOEXEC), "w+b", buffering=0)
    file.write(data)
    file.seek(0)
    return file


@contextlib.asynccontextmanager
async def _reading(pipe: IO[bytes]) -> AsyncIterator[asyncio.StreamReader]:
    """Give a reader of the pipe, which is closed in the end."""
    reader = asyncio.StreamReader(limit=_READ_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        yield reader
    finally:
        transport.close()


async def _lines(pipe: IO[bytes]) -> AsyncIterator[str]:
    """Yield whole lines, so that nothing is cut where a read happened to end; overlong ones without their rest."""
    async with _reading(pipe) as reader:
        waiting = bytearray()
        while text := await reader.read(4096):
            *whole, rest = (bytes(waiting) + text.replace(b"\r", b"\n")).split(b"\n")
            for line in whole:
                if line.strip():
                    yield line[:_LONGEST_LINE_BYTES].decode("utf-8", "replace")
            waiting = bytearray(rest[:_LONGEST_LINE_BYTES])
        if waiting.strip():
            yield waiting.decode("utf-8", "replace")


def _without(line: str, secrets: tuple[str, ...]) -> str:
    """Return a line without secrets, and without the addresses in memory that ffmpeg likes to tell."""
    for secret in secrets:
        line = line.replace(secret, "***")
    return _ADDRESS.sub("]", line)
