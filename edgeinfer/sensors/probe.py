"""Read a sensor without ever waiting for it.

A driver can hang inside `read` (a stuck bus, a dead firmware mailbox), and neither `O_NONBLOCK` nor a time limit helps
against that: only another thread does. So each sensor that can block has one, named after it, with at most one read
outstanding. The loop asks, waits two milliseconds at most (a register read takes a tenth of one), and takes a slower
answer at its next round. A read that never ends costs that thread and nothing else; the thread is a daemon thread and
doesn't keep the process from exiting.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

_PATIENCE_S = 0.002
_MAX_TEXT_BYTES = 4096  # sysfs never shows more than a page

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Waiting:
    """No answer yet to what was asked at `since_ns`."""

    since_ns: int


class Probe(Protocol[T_co]):
    """One sensor that can be asked."""

    def poll(self, now_ns: int) -> T_co | OSError | Waiting:
        """Return the newest answer, which is at most one round old, and ask for the next. Never blocks."""
        ...

    def close(self) -> None:
        """Ask no more."""
        ...

    @property
    def hanging(self) -> bool:
        """Whether a read that was begun has not ended, so that closing has ended nothing yet."""
        ...


class InlineProbe(Generic[T]):
    """Reads in the caller's thread: for what cannot block, and for tests."""

    def __init__(self, name: str, read: Callable[[], T]) -> None:
        self.name = name
        self._read = read

    def poll(self, now_ns: int) -> T | OSError | Waiting:  # noqa: ARG002
        """Read now."""
        try:
            return self._read()
        except OSError as error:
            return error

    def close(self) -> None:
        """Nothing to end."""

    @property
    def hanging(self) -> bool:
        """Return False: a read that hangs hangs its caller."""
        return False


class ThreadProbe(Generic[T]):
    """Reads in a thread of its own, named `sensor[NAME]`, which starts with the first poll.

    `poll` and `close` belong to one thread (the loop's).
    """

    def __init__(self, name: str, read: Callable[[], T]) -> None:
        self.name = name
        self._read = read
        self._asked = threading.Semaphore(0)
        self._answered = threading.Event()
        self._answer: T | OSError = OSError("not read yet")
        self._since_ns: int | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def poll(self, now_ns: int) -> T | OSError | Waiting:
        """Return the newest answer and ask for the next; wait 2 ms at most."""
        if self._since_ns is None:
            self._ask(now_ns)
            self._answered.wait(_PATIENCE_S)
        assert self._since_ns is not None
        if not self._answered.is_set():
            return Waiting(self._since_ns)
        answer, slow = self._answer, self._since_ns < now_ns
        self._since_ns = None
        if slow:  # the next answer is under way until we come again
            self._ask(now_ns)
        return answer

    def close(self) -> None:
        """End the thread, as soon as the driver lets it."""
        self._closing = True
        self._asked.release()

    @property
    def hanging(self) -> bool:
        """Return whether the thread is still inside a read."""
        return self._thread is not None and self._thread.is_alive() and not self._answered.is_set()

    def _ask(self, now_ns: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"sensor[{self.name}]", daemon=True)
            self._thread.start()
        self._since_ns = now_ns
        self._answered.clear()
        self._asked.release()

    def _run(self) -> None:
        while True:
            self._asked.acquire()
            if self._closing:
                return
            try:
                self._answer = self._read()
            except OSError as error:
                self._answer = error
            self._answered.set()


def read_text(path: str | os.PathLike[str]) -> str:
    """Return what a /sys or /proc attribute says, stripped; at most one page of it.

    Raises:
        OSError: not there, not allowed, or the driver's own error.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _MAX_TEXT_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(fd)


def read_static(path: str | os.PathLike[str]) -> str | None:
    """Return what an attribute without a driver behind it says (a name, a list of CPUs); None when it can't be read.

    For the loop thread: a FIFO in its place answers with nothing instead of blocking.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return os.read(fd, _MAX_TEXT_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return None
    finally:
        os.close(fd)
