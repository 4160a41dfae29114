"""Play the jobs of a trace against servers that are asked over HTTP, all by the same client, and count.

The client has a bounded number of connections and keeps them; a job that finds none free waits for one, and is not
sent once it is due. A job's deadline counts from the moment at which the trace sends it, whenever it really is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from edgeinfer.clock import NS_PER_S
from edgeinfer_bench.player import Sent

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_ANSWER_TIMEOUT_S = 20.0
_MAX_HEAD_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Server:
    """One side of the comparison."""

    connect: Callable[[], Awaitable[Stream]]
    request: Callable[[Sent, int], Sequence[bytes]]
    """The whole HTTP request for a job that is due in so many nanoseconds."""
    connections: int


@dataclass(slots=True)
class Answers:
    """What became of the jobs, by their number; service time in nanoseconds."""

    on_time_ns: int = 0
    in_time: int = 0
    late: int = 0
    refused: int = 0
    """Answered, but not with 200."""
    unsent: int = 0
    """Due before a connection was free."""

    def add(self, other: Answers) -> None:
        """Count another window in."""
        self.on_time_ns += other.on_time_ns
        self.in_time += other.in_time
        self.late += other.late
        self.refused += other.refused
        self.unsent += other.unsent

    def count(self, job: Sent, status: int, *, in_time: bool) -> None:
        """Count one answer."""
        if status != 200:
            self.refused += 1
        elif in_time:
            self.in_time += 1
            self.on_time_ns += job.service_ns
        else:
            self.late += 1

    @property
    def note(self) -> str:
        """For people."""
        return f"{self.in_time} in time, {self.late} late, {self.refused} refused, {self.unsent} not sent"


async def play(server: Server, jobs: Sequence[Sent]) -> Answers:
    """Play the jobs, and wait until everything that was sent is answered.

    Raises:
        OSError: the server cannot be reached, or hangs up.
        TimeoutError: it leaves a request without an answer.
    """
    answers = Answers()
    waiting: asyncio.Queue[Sent] = asyncio.Queue(maxsize=len(jobs))
    async with contextlib.AsyncExitStack() as stack:
        streams = []
        for _ in range(server.connections):
            stream = await server.connect()
            stack.callback(stream[1].close)
            streams.append(stream)
        begun_ns = time.monotonic_ns()
        async with asyncio.TaskGroup() as group:
            sides = [
                group.create_task(_serve(server, stream, waiting, answers, begun_ns), name=f"connection[{number}]")
                for number, stream in enumerate(streams)
            ]
            for job in jobs:
                await asyncio.sleep(max(0, begun_ns + job.at_ns - time.monotonic_ns()) / NS_PER_S)
                waiting.put_nowait(job)
            await waiting.join()
            for side in sides:
                side.cancel()
    return answers


async def _serve(server: Server, stream: Stream, waiting: asyncio.Queue[Sent], answers: Answers, begun_ns: int) -> None:
    """Send one job after the other over one connection, for ever."""
    while True:
        job = await waiting.get()
        try:
            left_ns = begun_ns + job.due_ns - time.monotonic_ns()
            if left_ns <= 0:
                answers.unsent += 1
                continue
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                stream[1].writelines(server.request(job, left_ns))
                await stream[1].drain()
                status = await read_reply(stream[0])
            answers.count(job, status, in_time=time.monotonic_ns() <= begun_ns + job.due_ns)
        finally:
            waiting.task_done()


async def read_reply(reader: asyncio.StreamReader) -> int:
    """Read one whole HTTP reply and return its status.

    Raises:
        OSError: the server hangs up, or its reply has no length.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = content_length(head)
        await reader.readexactly(length)
        return int(head.split(b" ", 2)[1])
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError) as error:
        raise OSError(f"no HTTP reply: {error}") from error


def content_length(head: bytes) -> int:
    """Return the length of the body that follows this head.

    Raises:
        ValueError: it does not say.
    """
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    raise ValueError(f"no Content-Length in {head[:200]!r}")


async def to_port(port: int) -> Stream:
    """Connect to a port of this machine."""
    return await asyncio.open_connection("127.0.0.1", port, limit=_MAX_HEAD_BYTES)


async def to_socket(path: str) -> Stream:
    """Connect to a UNIX socket."""
    return await asyncio.open_unix_connection(path, limit=_MAX_HEAD_BYTES)
