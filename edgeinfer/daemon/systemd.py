"""Tell systemd how we are, and prove that the scheduler is alive.

Owns the notification socket and the watchdog's rhythm. What is worth telling, and when the service is ready, is the
daemon's to decide (docs/systemd.md says what an operator may rely on). Nothing here can stop the service: when nobody
listens, every call does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, MutableMapping

from edgeinfer.clock import NS_PER_S, NS_PER_US, Clock, sleep_until

log = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 0.25
"""Longest wait for room in systemd's queue; the message is dropped then. Stalls the loop, hence short."""
_STATUS_BYTES = 512
"""A status is one line for `systemctl status`."""
_CHECKS_PER_PING = 10
"""While progress is missing (or a ping got lost) it is looked for this often per ping interval."""


class Notifier:
    """The datagram socket named by NOTIFY_SOCKET. Loop thread only; messages are sent at once."""

    def __init__(self, address: str | None, *, watchdog_ns: int | None = None) -> None:
        self.watchdog_ns = watchdog_ns
        """Time without a ping after which systemd kills us; None when it doesn't watch."""
        self._address = f"\0{address[1:]}" if address and address.startswith("@") else address
        self._socket: socket.socket | None = None
        self._warned = False
        if address and not address.startswith(("/", "@")):
            log.warning("notify_unsupported address=%s", address)
            self._address = None
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.settimeout(_SEND_TIMEOUT_S)

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str], *, pid: int | None = None) -> Notifier:
        """Take systemd's variables out of `environ`, so that no child process speaks in our name.

        A watchdog meant for another process (WATCHDOG_PID) is none of ours.
        """
        address = environ.pop("NOTIFY_SOCKET", None)
        watchdog_us = environ.pop("WATCHDOG_USEC", "")
        watchdog_pid = environ.pop("WATCHDOG_PID", "")
        ours = not watchdog_pid or watchdog_pid == str(os.getpid() if pid is None else pid)
        try:
            watchdog_ns = int(watchdog_us) * NS_PER_US if watchdog_us and ours else 0
        except ValueError:
            log.warning("watchdog_ignored usec=%r", watchdog_us)
            watchdog_ns = 0
        return cls(address, watchdog_ns=watchdog_ns if watchdog_ns > 0 else None)

    @property
    def listening(self) -> bool:
        """Whether a service manager asked to be told."""
        return self._socket is not None

    def ready(self, status: str = "") -> bool:
        """Say that the start is complete, as docs/systemd.md defines it."""
        return self._send("READY=1", *_status(status))

    def status(self, text: str) -> bool:
        """Show `text` in `systemctl status`; its first line, shortened to fit."""
        return self._send(*_status(text))

    def stopping(self, status: str = "") -> bool:
        """Say that a clean stop has begun."""
        return self._send("STOPPING=1", *_status(status))

    def extend_timeout(self, duration_ns: int) -> bool:
        """Ask for `duration_ns` more, from now, before a start or stop counts as failed."""
        return self._send(f"EXTEND_TIMEOUT_USEC={max(1, duration_ns // NS_PER_US)}")

    def ping(self) -> bool:
        """Feed the watchdog. Only `Watchdog` calls this."""
        return self._send("WATCHDOG=1")

    def close(self) -> None:
        """Close the socket; later messages go nowhere."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> bool:
        """Return whether systemd took the message (True when nobody listens: nothing is missing)."""
        if self._socket is None or not lines:
            return True
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address or "")
        except OSError as error:  # TimeoutError is one: systemd's queue is full
            if not self._warned:
                log.warning("notify_failed message=%s error=%s", lines[0], error)
            self._warned = True
            return False
        self._warned = False
        return True


class Watchdog:
    """Feeds the watchdog at half its time, and only while the scheduler gets somewhere.

    A timer of its own would ping for ever while inference is stuck. `progress` must grow at least once per half
    watchdog time while all is well, idle or busy.
    """

    def __init__(self, notifier: Notifier, *, progress: Callable[[], int], clock: Clock) -> None:
        self._notifier = notifier
        self._progress = progress
        self._clock = clock

    async def run(self) -> None:
        """Ping for ever; return at once when nobody watches."""
        if self._notifier.watchdog_ns is None:
            return
        interval_ns = self._notifier.watchdog_ns // 2
        seen, since_ns, withheld = self._progress(), self._clock.now_ns(), False
        due_ns = since_ns + interval_ns
        while True:
            await sleep_until(due_ns, self._clock)
            now_ns = self._clock.now_ns()
            progress = self._progress()
            if progress != seen and self._notifier.ping():
                if withheld:
                    log.warning("watchdog_resumed stalled_s=%.1f", (now_ns - since_ns) / NS_PER_S)
                    self._notifier.status("making progress again")
                seen, since_ns, withheld = progress, now_ns, False
                due_ns = now_ns + interval_ns
                continue
            if progress == seen and not withheld:
                withheld = True
                log.error("watchdog_withheld progress=%d for_s=%.1f", progress, (now_ns - since_ns) / NS_PER_S)
                self._notifier.status(
                    "the scheduler makes no progress; the watchdog restarts the service unless it resumes"
                )
            due_ns = now_ns + max(1, interval_ns // _CHECKS_PER_PING)


@contextlib.asynccontextmanager
async def extended_start(
    notifier: Notifier, *, clock: Clock, every_ns: int = 10 * NS_PER_S, limit_ns: int = 600 * NS_PER_S
) -> AsyncIterator[None]:
    """Keep a slow start or stop from being killed while the body runs, for `limit_ns` at most.

    Asks every `every_ns` for three times that long: a body that hangs beyond the limit is still ended by systemd.
    """

    async def ask() -> None:
        end_ns = clock.now_ns() + limit_ns
        while (now_ns := clock.now_ns()) < end_ns:
            notifier.extend_timeout(3 * every_ns)
            await sleep_until(now_ns + every_ns, clock)

    task = asyncio.create_task(ask(), name="extend-timeout")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _status(text: str) -> tuple[str, ...]:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return (f"STATUS={line.encode()[:_STATUS_BYTES].decode(errors='ignore')}",) if line else ()
