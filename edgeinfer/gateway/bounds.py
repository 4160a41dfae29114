"""How much one gateway takes at most: connections, bytes, seconds; and the counters of bytes that hold it to that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

SCRATCH_BYTES: Final = 256 << 10
"""One buffer for all connections, for what is read before its place is known and for what nobody will take."""
READ_BYTES: Final = 64 << 10
"""Most that is read at once before a body's length is known."""
_DECODING_BYTES: Final = 4 << 20
"""What one request or answer of the most JSON becomes while it is read or written; one at a time is (`turns`)."""
_SHARE: Final = 32
_LEAST_BODIES_BYTES: Final = 4 << 20
_MOST_BODIES_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one gateway takes at most."""

    connections: int = 32
    """One more is answered 503 and closed."""
    leaving: int = 256
    """Callers that are told so at once; beyond them the one that was told first is cut off."""
    head_bytes: int = 32 << 10
    body_bytes_in_flight: int = _MOST_BODIES_BYTES
    """Bodies of all connections together, and what was read from their shared memory; beyond it: 429."""
    idle_s: float = 60.0
    """A connection without a request is closed."""
    head_s: float = 10.0
    body_s: float = 30.0
    write_s: float = 30.0
    """A caller that does not read its answer is cut off."""
    chunks: int = 8192
    """Most chunks of one chunked body."""
    grace_s: float = 0.25
    """An answer that is not read by then is copied, and what it borrowed is given back."""
    copied_bytes: int = 8 << 20
    """Such copies together; a caller beyond it is cut off."""
    spare_s: float = 0.25
    """At the limit of connections, one that has been without a request for longer is closed for a new one, …"""
    stall_s: float = 2.0
    """… and one whose body has not come on for longer; that one also when others need the room for theirs."""
    linger_s: float = 2.0
    """How long what a refused caller still sends is read away, so that it comes to read why."""
    unread_bytes: int = 8 << 20
    """Of a body that nobody takes, so much is read away for the sake of the connection; with more it ends."""
    regions: int = 4
    """Shared memory that one connection may have registered at once."""

    @property
    def buffer_bytes(self) -> int:
        """Most bytes that all buffers of a gateway with these bounds have at once: what to reserve for it."""
        heads = self.connections * 9 * (self.head_bytes + READ_BYTES) // 8  # bytearrays grow by an eighth
        bodies = self.body_bytes_in_flight + self.body_bytes_in_flight // 8
        return SCRATCH_BYTES + heads + bodies + self.copied_bytes + _DECODING_BYTES


def bounds_within(ceiling_bytes: int) -> Bounds:
    """Return bounds for a service that may use so much memory: a 32nd of it for bodies, from 4 to 64 MiB."""
    bodies = min(max(ceiling_bytes // _SHARE, _LEAST_BODIES_BYTES), _MOST_BODIES_BYTES)
    return Bounds(body_bytes_in_flight=bodies, copied_bytes=min(bodies // 2, 8 << 20))


class Room:
    """Counts bytes in use by all connections against one limit. Loop thread only."""

    def __init__(self, limit_bytes: int, relieve: Callable[[], bool] = lambda: False) -> None:
        """`relieve` is asked when there is no room: it has somebody give back what it holds for nothing, or not."""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._relieve = relieve

    def has(self, size_bytes: int) -> bool:
        """Return whether so many bytes can be counted in now."""
        while self.used_bytes + size_bytes > self.limit_bytes:
            if size_bytes > self.limit_bytes or not self._relieve():
                return False
        return True

    def take(self, size_bytes: int) -> bool:
        """Count bytes in, unless they would exceed the limit; return whether they were counted."""
        if not self.has(size_bytes):
            return False
        self.used_bytes += size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        """Count bytes out again."""
        self.used_bytes -= size_bytes
