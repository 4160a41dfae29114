"""Carry control messages and file descriptors between the daemon and a process it started.

A SOCK_SEQPACKET pair: one message a packet, order kept, end seen. Messages are msgspec structs in msgpack, bounded
by `MAX_MESSAGE_BYTES`; tensors never travel here, they lie in slots (`slot`). `DaemonEnd` lives on the event loop
(asyncio's streams refuse this socket type), `ProcessEnd` blocks. What the messages mean is `messages`'.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from edgeinfer.errors import ProtocolError

if TYPE_CHECKING:
    import asyncio  # the process's end never imports it

MAX_MESSAGE_BYTES: Final = 128 << 10
"""Largest message; below the kernel's default send buffer (208 KiB), so that one always fits."""
MAX_MESSAGE_FDS: Final = 4
_READS_AFTER_END: Final = 512
_WHOLE: Final = int(socket.MSG_TRUNC)  # as a number: of two flags of the enum, Python would make a third one each time
_TRUNCATED: Final = int(socket.MSG_TRUNC) | int(socket.MSG_CTRUNC)
_CLOSE_ON_EXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_FD_BYTES: Final = array.array("i").itemsize
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MAX_MESSAGE_FDS * _FD_BYTES)

Received = TypeVar("Received")
Sent = TypeVar("Sent", bound=msgspec.Struct)


class ChannelClosed(ProtocolError):
    """The other side is gone: its process ended, or is ending."""


class ChannelFull(ProtocolError):
    """The other side has not read for a whole queue of messages: it is stuck."""


def _send(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Send one packet; a packet is sent whole or not at all."""
    if fds:
        sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())])
    else:
        sock.send(data)


def post(sock: socket.socket, message: msgspec.Struct, fds: Sequence[int]) -> None:
    """Send a first message over a new pair, before anybody is at either end: it waits there.

    Raises:
        OSError: the kernel has no memory or no descriptor for it.
    """
    _send(sock, _encode(msgspec.msgpack.Encoder(), message), fds)


def _receive(sock: socket.socket, buffer: bytearray) -> tuple[memoryview, list[int]]:
    """Read one packet into `buffer`; an empty one means the end. Truncation is a protocol error."""
    count, ancillary, flags, _ = sock.recvmsg_into([buffer], _ANCILLARY_BYTES, _CLOSE_ON_EXEC)
    if not ancillary and not flags & _TRUNCATED:
        return memoryview(buffer)[:count], []
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % _FD_BYTES])
    if flags & _TRUNCATED:
        close_all(fds)
        raise _too_large()
    return memoryview(buffer)[:count], fds.tolist()


def _receive_alone(sock: socket.socket, buffer: bytearray) -> memoryview:
    """Read one packet of somebody who has no descriptors to pass: the kernel closes those that come all the same."""
    count = sock.recv_into(buffer, 0, _WHOLE)  # tells the packet's own length, also where that does not fit
    if count > len(buffer):
        raise _too_large()
    return memoryview(buffer)[:count]


def _too_large() -> ProtocolError:
    return ProtocolError(f"a message on the worker channel is larger than {MAX_MESSAGE_BYTES} bytes")


def close_all(fds: Sequence[int] | array.array[int]) -> None:
    """Close descriptors that came with a message nobody wants."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _encode(encoder: msgspec.msgpack.Encoder, message: msgspec.Struct) -> bytes:
    data = encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"{type(message).__name__} of {len(data)} bytes exceeds the channel's {MAX_MESSAGE_BYTES} bytes"
        )
    return data


class DaemonEnd(Generic[Received, Sent]):
    """The event loop's end of a channel.

    Loop thread only. `union` is the type of what comes. Messages are handed to `on_message` in order; descriptors
    travel to the process only. `on_closed` is called once when the other side is gone (with an empty text) or spoke
    nonsense (with what was wrong); not after `close`. The out queue holds `out_limit`
    messages beyond the kernel's own buffer; when it is full, `send` raises `ChannelFull` and nothing is sent.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        union: Any,
        *,
        on_message: Callable[[Received], None],
        on_closed: Callable[[str], None],
        out_limit: int = 64,
    ) -> None:
        self._sock = sock
        self._loop = loop
        self._on_message = on_message
        self._on_closed = on_closed
        self._out_limit = out_limit
        self._out: deque[tuple[bytes, list[int]]] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(union)
        self._buffer = bytearray(MAX_MESSAGE_BYTES)
        self._open = True
        loop.add_reader(sock.fileno(), self._read)

    @property
    def is_open(self) -> bool:
        """Whether the other side is there, as far as was heard."""
        return self._open

    def send(self, message: Sent, fds: Sequence[int] = ()) -> None:
        """Send now, or queue when the kernel's buffer is full. `fds` stay the caller's (they are duplicated).

        Raises:
            ChannelClosed: the other side is gone.
            ChannelFull: it has not read for too long.
        """
        if not self._open:
            raise ChannelClosed("the worker channel is closed")
        data = _encode(self._encoder, message)
        if not self._out:
            try:
                _send(self._sock, data, fds)
            except BlockingIOError:
                pass
            except OSError as error:
                raise ChannelClosed(f"the worker channel broke: {error.strerror}") from error
            else:
                return
        if len(self._out) >= self._out_limit:
            raise ChannelFull(f"{len(self._out)} messages wait for a process that does not read them")
        self._out.append((data, [os.dup(fd) for fd in fds]))
        self._loop.add_writer(self._sock.fileno(), self._flush)

    def drain(self) -> None:
        """Deliver what the process has sent and nobody has read, before its end or its silence is acted upon."""
        for _ in range(_READS_AFTER_END):
            if not self._read():
                return

    def close(self) -> None:
        """Close our end: the other side reads the end of the stream. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for _, fds in self._out:
            close_all(fds)
        self._out.clear()

    def _flush(self) -> None:
        while self._out:
            data, fds = self._out[0]
            try:
                _send(self._sock, data, fds)
            except BlockingIOError:
                return
            except ConnectionError:  # it ended; how is its exit status to tell
                self._fail("")
                return
            except OSError as error:
                self._fail(f"the worker channel broke: {error.strerror}")
                return
            self._out.popleft()
            close_all(fds)
        self._loop.remove_writer(self._sock.fileno())

    def _read(self) -> bool:
        """Deliver one message and return whether there was one; while there are more, the loop calls again.

        One each time: most come alone, and to look for another costs a call of the kernel in vain.
        """
        if not self._open:
            return False  # closed by the receiver of the message before
        try:
            data = _receive_alone(self._sock, self._buffer)
            if not data:
                self._fail("")
                return False
            message = self._decoder.decode(data)
        except BlockingIOError:
            return False
        except ConnectionError:  # it ended with words of ours unread; how is its exit status to tell
            self._fail("")
            return False
        except (OSError, ProtocolError, msgspec.MsgspecError) as error:
            self._fail(f"unreadable message: {error}")
            return False
        self._on_message(message)
        return True

    def _fail(self, reason: str) -> None:
        self.close()
        self._on_closed(reason)


class ProcessEnd(Generic[Received, Sent]):
    """The blocking end of a channel, in a process that the daemon started.

    One thread reads; any thread may send (a packet is written whole or not at all).
    """

    def __init__(self, sock: socket.socket, union: Any) -> None:
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(union)
        self._buffer = bytearray(MAX_MESSAGE_BYTES)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._sock.fileno()

    def receive(self) -> tuple[Received, list[int]]:
        """Wait for the next message and its descriptors, which the caller then owns.

        Raises:
            ChannelClosed: the daemon closed its end or is gone.
            ProtocolError: what came is not one of our messages.
        """
        try:
            data, fds = _receive(self._sock, self._buffer)
        except ConnectionError as error:
            raise ChannelClosed("the daemon is gone") from error
        if not data:
            raise ChannelClosed("the daemon closed the channel")
        try:
            return self._decoder.decode(data), fds
        except msgspec.MsgspecError as error:
            close_all(fds)
            raise ProtocolError(f"unreadable message: {error}") from error

    def send(self, message: Sent) -> None:
        """Send a message, waiting while the daemon's buffer is full.

        Raises:
            ChannelClosed: the daemon is gone.
        """
        data = _encode(self._encoder, message)
        try:
            _send(self._sock, data, ())
        except OSError as error:
            raise ChannelClosed(f"the daemon is gone: {error.strerror}") from error

    def close(self) -> None:
        """Close this end, for instance the copy that a fork inherited."""
        self._sock.close()
