"""One caller's socket: reads and writes that wait, each at most until its time, and knowing when the caller is gone.

Reads from the loop's own callback, straight into where the bytes belong; one timer serves all waits. A transport of
asyncio would copy each body twice more, and cannot take the descriptors that callers pass. What the bytes mean is
`connection`'s.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import select
import socket
from collections.abc import Callable
from typing import Final

from edgeinfer.gateway.bounds import READ_BYTES

_LOOK_S: Final = 0.05
_DESCRIPTORS: Final = 4
"""Most descriptors that come with one read; the kernel closes what is beyond."""
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_DESCRIPTORS * array.array("i").itemsize)


class Stream:
    """A connected socket. Loop thread only; one task reads and writes it. Owns the socket and what came over it."""

    def __init__(self, sock: socket.socket, scratch: memoryview) -> None:
        """Take over a socket that does not block. `scratch` is everybody's: nothing stays in it."""
        self.pending = bytearray()
        """What came and was not used yet."""
        self.descriptors: list[int] = []
        """What was passed along with it. Whoever takes one closes it."""
        self.closed = False
        self._sock = sock
        self._fd = sock.fileno()
        self._scratch = scratch
        self._loop = asyncio.get_running_loop()
        self._reading: asyncio.Future[int] | None = None
        self._into: memoryview | None = None
        self._due_s = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._watcher: Callable[[], None] | None = None
        self._look: asyncio.TimerHandle | None = None
        self._listens = True
        self._loop.add_reader(self._fd, self._readable)

    # Reading

    async def receive(self, due_s: float) -> int:
        """Add what comes next to `pending`, 64 KiB at most, and return how much that was; 0 when no more will come.

        Raises:
            TimeoutError: nothing came until `due_s`, on the loop's clock.
        """
        return await self._wait_to_read(None, due_s)

    async def receive_into(self, view: memoryview, due_s: float) -> int:
        """Read into `view`, as much as there is, and return how much that was; 0 when no more will come.

        Raises:
            TimeoutError: nothing came until `due_s`.
        """
        try:
            return self._sock.recv_into(view)
        except BlockingIOError:
            return await self._wait_to_read(view, due_s)
        except OSError:
            return 0

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone` once when the caller hangs up, until `unwatch`.

        One that only says that it sends no more (`shutdown`) still waits. Of a next request sent meanwhile one read is
        kept, not more.
        """
        self._watcher = gone
        if not self._listens:  # it has said more already, or its end: only a look tells that it is gone
            self._look = self._loop.call_later(_LOOK_S, self._look_again)

    def unwatch(self) -> None:
        """Watch no more."""
        self._watcher = None
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def _wait_to_read(self, into: memoryview | None, due_s: float) -> asyncio.Future[int]:
        self._reading = self._loop.create_future()
        if self.closed:
            self._reading.set_result(0)
            return self._reading
        self._into = into
        self._due_s = due_s
        if self._alarm is None or self._alarm.when() > due_s:
            self._arm(due_s)
        if not self._listens:
            self._listen()
        return self._reading

    def _readable(self) -> None:
        reading = self._reading
        if reading is not None:
            if reading.done():  # its task was cancelled, or has not seen yet that it is too late
                self._pause()
                return
            try:
                got = self._take_in()
            except BlockingIOError:
                return
            except OSError:
                got = 0
            self._reading = None
            reading.set_result(got)
        elif self._watcher is not None:
            self._notice()
        else:
            self._pause()

    def _take_in(self) -> int:
        if self._into is not None:
            return self._sock.recv_into(self._into)
        got, ancillary, _, _ = self._sock.recvmsg_into(
            [self._scratch[:READ_BYTES]], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        self.pending += self._scratch[:got]
        if ancillary:
            self._keep(ancillary)
        return got

    def _keep(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        """Keep the descriptors that came, as many as one read may bring."""
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                passed = array.array("i")
                passed.frombytes(data[: len(data) - len(data) % passed.itemsize])
                self.descriptors += passed
        while len(self.descriptors) > _DESCRIPTORS:
            os.close(self.descriptors.pop())

    def drop_descriptors(self) -> None:
        """Close what was passed and nobody took."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def _notice(self) -> None:
        """Take in what the caller says although it should wait; find out whether it has gone."""
        self._into = None
        try:
            got = self._take_in()
        except BlockingIOError:
            return
        except OSError:
            got = 0
        self._pause()
        if got:
            self._look = self._loop.call_later(_LOOK_S, self._look_again)
        else:
            self._look_again()

    def _look_again(self) -> None:
        if self._watcher is None:
            return
        if self._hung_up():
            self._watcher()
        else:
            self._look = self._loop.call_later(_LOOK_S, self._look_again)

    def _hung_up(self) -> bool:
        """Return whether the other side has closed both ways, which reading alone cannot tell from one way."""
        if self.closed:
            return True
        poll = select.poll()
        poll.register(self._fd, 0)  # POLLHUP and POLLERR are always told
        return bool(poll.poll(0))

    def _arm(self, due_s: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(due_s, self._overdue)

    def _overdue(self) -> None:
        self._alarm = None
        reading = self._reading
        if reading is None or reading.done():
            return
        if self._loop.time() >= self._due_s:
            self._reading = None
            reading.set_exception(TimeoutError())
        else:
            self._arm(self._due_s)

    def _listen(self) -> None:
        self._listens = True
        self._loop.add_reader(self._fd, self._readable)

    def _pause(self) -> None:
        """Nobody reads now: let what comes wait in the kernel."""
        if self._listens:
            self._listens = False
            self._loop.remove_reader(self._fd)

    # Writing

    def send_now(self, parts: list[bytes | memoryview]) -> list[bytes | memoryview]:
        """Send as much as the kernel takes at once, and return the rest.

        Raises:
            ConnectionError: the caller is gone.
        """
        while parts:
            try:
                sent = self._sock.sendmsg(parts[:64])
            except BlockingIOError:
                break
            except OSError as error:
                raise ConnectionAbortedError(f"the caller is gone: {error.strerror}") from error
            parts = _after(parts, sent)
        return parts

    async def writable(self, due_s: float) -> bool:
        """Wait until the kernel takes more, and return whether it did by `due_s`."""
        if self.closed:
            return True
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._fd, lambda: None if ready.done() else ready.set_result(None))
        try:
            async with asyncio.timeout_at(due_s):
                await ready
        except TimeoutError:
            return False
        finally:
            if not self.closed:
                self._loop.remove_writer(self._fd)
        return True

    def say_no_more(self) -> None:
        """Tell the caller that nothing more will come."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    async def read_away(self, most_bytes: int | None, due_s: float) -> bool:
        """Read `most_bytes` (None: all there is) that nobody will take; return whether they came by `due_s`."""
        left = most_bytes
        try:
            while left is None or left > 0:
                got = await self.receive_into(self._scratch if left is None else self._scratch[:left], due_s)
                if not got:
                    return left is None
                if left is not None:
                    left -= got
                await asyncio.sleep(0)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """End the connection; whoever waits for it sees its end. Idempotent."""
        if self.closed:
            return
        self._pause()
        self._loop.remove_writer(self._fd)
        self.closed = True
        self.drop_descriptors()
        self._sock.close()
        if self._alarm is not None:
            self._alarm.cancel()
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(0)
        self._reading = None


def _after(parts: list[bytes | memoryview], sent: int) -> list[bytes | memoryview]:
    """Return what is left of the parts after so many bytes."""
    for number, part in enumerate(parts):
        if sent < len(part):
            return [memoryview(part)[sent:], *parts[number + 1 :]]
        sent -= len(part)
    return []
