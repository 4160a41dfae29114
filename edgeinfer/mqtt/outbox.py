"""Hold the messages that can't go out yet, in bounded memory, and count every one that is lost.

Owns what waits; when it goes out is `link`. Two kinds wait (see `Keep`): FIFO messages in order, the oldest dropped
when there are too many; LATEST messages, one per topic, the newest taking the place of the older. FIFO messages
leave first: they are news, the others are a picture that is still true a moment later.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from edgeinfer.mqtt.message import Keep, Message


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message in the outbox, and how it is kept there."""

    message: Message
    keep: Keep


class Outbox:
    """A bounded buffer of outgoing messages. Loop thread only.

    Holds at most `max_messages` FIFO messages, as many LATEST topics, and `max_bytes` of payload together. When full,
    the oldest FIFO message goes first, then the LATEST topic that was written longest ago. Each loss is in `dropped`
    by its cause: `overflow`, `replaced`, `oversize`.
    """

    def __init__(self, *, max_messages: int = 1000, max_bytes: int = 4 << 20) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._fifo: deque[Message] = deque()
        self._latest: dict[str, Message] = {}
        self._bytes = 0
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._fifo) + len(self._latest)

    @property
    def size_bytes(self) -> int:
        """Payload bytes that are held."""
        return self._bytes

    def put(self, message: Message, keep: Keep) -> None:
        """Hold a message until it is taken; may drop an older one, or this one when it alone is too large."""
        if self._accept(message, keep):
            if keep is Keep.LATEST:
                if (older := self._latest.pop(message.topic, None)) is not None:
                    self._forget(older, "replaced")
                self._latest[message.topic] = message
            else:
                self._fifo.append(message)
            self._bytes += len(message.payload)
            self._shrink()

    def put_back(self, waiting: Waiting) -> None:
        """Hold again, in front, what was taken and then not delivered; a newer LATEST message on its topic wins."""
        message = waiting.message
        if not self._accept(message, waiting.keep):
            return
        if waiting.keep is Keep.LATEST:
            if message.topic in self._latest:
                self.dropped["replaced"] += 1
                return
            self._latest = {message.topic: message, **self._latest}
        else:
            self._fifo.appendleft(message)
        self._bytes += len(message.payload)
        self._shrink()

    def lets_pass(self, message: Message, keep: Keep) -> bool:
        """Whether `message` may go out before what is held: only FIFO messages queue up behind each other.

        A LATEST message that passes takes an older one on its topic with it.
        """
        if keep is Keep.LATEST and (older := self._latest.pop(message.topic, None)) is not None:
            self._forget(older, "replaced")
        return keep is not Keep.FIFO or not self._fifo

    def peek(self) -> Message | None:
        """Return what `take` would return next."""
        if self._fifo:
            return self._fifo[0]
        return next(iter(self._latest.values()), None)

    def take(self) -> Waiting | None:
        """Remove and return the next message to send, None when nothing waits."""
        if self._fifo:
            waiting = Waiting(self._fifo.popleft(), Keep.FIFO)
        elif self._latest:
            waiting = Waiting(self._latest.pop(next(iter(self._latest))), Keep.LATEST)
        else:
            return None
        self._bytes -= len(waiting.message.payload)
        return waiting

    def _accept(self, message: Message, keep: Keep) -> bool:
        if keep is not Keep.NEVER and len(message.payload) <= self._max_bytes:
            return True
        self.dropped["offline" if keep is Keep.NEVER else "oversize"] += 1
        return False

    def _shrink(self) -> None:
        while len(self._fifo) > self._max_messages:
            self._forget(self._fifo.popleft(), "overflow")
        while len(self._latest) > self._max_messages:
            self._forget(self._latest.pop(next(iter(self._latest))), "overflow")
        while self._bytes > self._max_bytes:
            waiting = self.take()
            assert waiting is not None, "bytes are held only by messages"
            self.dropped["overflow"] += 1

    def _forget(self, message: Message, cause: str) -> None:
        self._bytes -= len(message.payload)
        self.dropped[cause] += 1
