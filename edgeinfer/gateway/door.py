"""Listen on the UNIX socket: make it, take callers in, and tell those for whom there is no room so that they read it.

Owns the callers that are on their way out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from edgeinfer.errors import LinkError
from edgeinfer.gateway.bounds import Bounds
from edgeinfer.gateway.connection import last_reply
from edgeinfer.gateway.reply import busy_reply

_log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
"""Callers that the kernel keeps for us; to one beyond, connecting fails or blocks, whatever we would have said."""
_AT_A_TIME: Final = 64
_REST_S: Final = 0.2
"""After running out of descriptors."""
_MAX_PATH_BYTES: Final = 107
"""sun_path of Linux, without its final zero."""


class Door:
    """Takes callers in. Loop thread only."""

    def __init__(self, bounds: Bounds, scratch: memoryview, take: Callable[[socket.socket], bool]) -> None:
        """`take` is given each caller's socket; it returns whether it took it over."""
        self._bounds = bounds
        self._scratch = scratch
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._leaving: OrderedDict[int, _Leaving] = OrderedDict()
        self.turned_away = 0
        """Callers for whom there was no room."""

    @contextlib.contextmanager
    def open(self, listener: socket.socket) -> Iterator[None]:
        """Take callers in until the end of the body."""
        try:
            self._loop.add_reader(listener.fileno(), self._accept, listener)
            yield
        finally:
            self._loop.remove_reader(listener.fileno())
            listener.close()
            for leaving in list(self._leaving.values()):
                leaving.end()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_AT_A_TIME):
            try:
                caller, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                    _log.error("no caller can be taken in: %s", error.strerror)
                    self._loop.remove_reader(listener.fileno())
                    self._loop.call_later(_REST_S, self._resume, listener)
                    return
                continue  # this caller has gone already
            caller.setblocking(False)  # noqa: FBT003 - the name of the socket's own
            if not self._take(caller):
                self._turn_away(caller)

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _turn_away(self, caller: socket.socket) -> None:
        """Tell a caller why it is not served, and let it finish sending for a while, so that it comes to read it."""
        self.turned_away += 1
        most = self._bounds.connections
        (reply,) = last_reply(busy_reply(f"{most} connections are open, no more are taken; close one or retry"))
        with contextlib.suppress(OSError):
            caller.send(reply)
            caller.shutdown(socket.SHUT_WR)
        while len(self._leaving) >= self._bounds.leaving:
            next(iter(self._leaving.values())).end()
        number = caller.fileno()
        self._leaving[number] = _Leaving(
            caller, self._scratch, self._bounds.linger_s, lambda: self._leaving.pop(number, None)
        )


class _Leaving:
    """A caller that was told to go, and may still be sending."""

    def __init__(
        self, caller: socket.socket, scratch: memoryview, linger_s: float, ended: Callable[[], object]
    ) -> None:
        self._caller = caller
        self._scratch = scratch
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(linger_s, self.end)
        self._loop.add_reader(caller.fileno(), self._read_away)

    def _read_away(self) -> None:
        try:
            if self._caller.recv_into(self._scratch):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self.end()

    def end(self) -> None:
        """Close it."""
        self._timer.cancel()
        self._loop.remove_reader(self._caller.fileno())
        self._caller.close()
        self._ended()


def listen(path: Path) -> socket.socket:
    """Bind the socket, over what a service that is gone left there.

    Raises:
        LinkError: it is taken or cannot be made.
    """
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise LinkError(f"the socket path {path} has more than {_MAX_PATH_BYTES} bytes; shorten paths.socket")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if path.exists() or path.is_symlink():
            _make_way(path)
        listener.bind(os.fspath(path))
        path.chmod(0o660)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise LinkError(f"cannot listen on {path}: {error.strerror}") from error
    except LinkError:
        listener.close()
        raise
    return listener


def _make_way(path: Path) -> None:
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise LinkError(f"{path} exists and is no socket; remove it, or change paths.socket")
    if _answers(path):
        raise LinkError(f"another service listens on {path}; stop it, or change paths.socket")
    path.unlink()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(1.0)
        try:
            trial.connect(os.fspath(path))
        except OSError:
            return False
        return True
