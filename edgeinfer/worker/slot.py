"""Tensors in shared memory: sealed memfd slots, who holds each one, and how many bytes they are.

A slot has two regions: the request's OIP body, written by the daemon, and the response's, written by the worker. It is
mapped by both and never copied in between. `SlotPool` is the daemon's: it creates slots, and hands one out again only
after the worker acknowledged the run that used it, or died. `MappedSlots` is the worker's view. Neither knows what a
tensor is; bytes are charged by whoever listens to `SlotPool.size_bytes`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Final, Self

from edgeinfer.errors import BudgetExceeded, InternalError, ProtocolError
from edgeinfer.request import Payload
from edgeinfer.worker.messages import Room, Span

ALIGNMENT: Final = 64
"""Tensors begin at multiples of this: a cache line, and what vector loads like best."""
_PAGE: Final = mmap.PAGESIZE
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def aligned(size_bytes: int, to: int = ALIGNMENT) -> int:
    """Round up to a multiple of `to`."""
    return -(-size_bytes // to) * to


def body_bytes(payload: Payload) -> int:
    """Return the room that a payload takes in a slot, alignment included."""
    tensors = 0
    for tensor in payload.tensors:
        tensors += memoryview(tensor).nbytes
    return aligned(len(payload.header)) + aligned(tensors)


def write_body(view: memoryview, slot: int, offset: int, payload: Payload) -> Span:
    """Copy a payload into `view` at `offset`, which the caller made sure has `body_bytes` of room."""
    header_bytes = len(payload.header)
    view[offset : offset + header_bytes] = payload.header
    at = body_offset = offset + aligned(header_bytes)
    for tensor in payload.tensors:
        raw = memoryview(tensor).cast("B")
        view[at : at + len(raw)] = raw
        at += len(raw)
    return Span(slot, offset, header_bytes, body_offset, at - body_offset)


def read_body(view: memoryview, span: Span) -> tuple[memoryview, memoryview]:
    """Return views of a span's header and tensors.

    Raises:
        ProtocolError: the span does not lie inside the slot.
    """
    header_end, body_end = span.offset + span.header_bytes, span.body_offset + span.body_bytes
    parts = (span.offset, span.header_bytes, span.body_offset, span.body_bytes)
    if min(parts) < 0 or header_end > span.body_offset or body_end > len(view):
        raise ProtocolError(f"span {parts} does not lie inside slot {span.slot} of {len(view)} bytes")
    return view[span.offset : header_end], view[span.body_offset : body_end]


class SlotState(StrEnum):
    """Who holds a slot."""

    FREE = "free"
    LEASED = "leased"
    """The daemon fills it for a request."""
    IN_WORKER = "in_worker"
    """A run uses it: only the worker's acknowledgement or death brings it back."""
    RESULT = "result"
    """Holds an answer that its reader has not released yet."""
    RETIRED = "retired"
    """Its memory is given back."""


_NEXT: Final[dict[SlotState, frozenset[SlotState]]] = {
    SlotState.FREE: frozenset({SlotState.LEASED, SlotState.RETIRED}),
    SlotState.LEASED: frozenset({SlotState.IN_WORKER, SlotState.FREE}),
    SlotState.IN_WORKER: frozenset({SlotState.RESULT, SlotState.FREE}),
    SlotState.RESULT: frozenset({SlotState.FREE}),
    SlotState.RETIRED: frozenset(),
}


@dataclass(slots=True)
class Slot:
    """One shared memory area, as the daemon holds it."""

    id: int
    fd: int
    view: memoryview
    request_bytes: int
    """Capacity of the request region, which begins at 0; the response region is all behind it."""
    attached: bool = False
    """The worker has mapped it."""
    state: SlotState = SlotState.FREE

    @property
    def size_bytes(self) -> int:
        """Bytes that it costs."""
        return len(self.view)

    @property
    def response_room(self) -> Room:
        """Where the answer may be written."""
        return Room(self.id, self.request_bytes, self.size_bytes - self.request_bytes)

    def move(self, state: SlotState) -> None:
        """Change hands; an impossible change is a bug of ours."""
        if state not in _NEXT[self.state]:
            raise InternalError(f"slot {self.id} cannot go from {self.state} to {state}")
        self.state = state


class SlotPool:
    """The slots of one worker.

    Loop thread only. Grows by need up to `max_slots` slots and `max_bytes` in all; `on_change` is called with the
    total after each change, so that a ledger can charge it. `on_free` is called whenever a slot can be had again.
    """

    def __init__(
        self,
        *,
        max_slots: int,
        max_bytes: int,
        on_change: Callable[[int], None] | None = None,
        on_free: Callable[[], None] | None = None,
    ) -> None:
        self._max_slots = max_slots
        self._max_bytes = max_bytes
        self._on_change = on_change
        self._on_free = on_free
        self._slots: dict[int, Slot] = {}
        self._next_id = 1
        self._closed = False

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots, in use or not."""
        return sum(slot.size_bytes for slot in self._slots.values())

    @property
    def states(self) -> dict[int, SlotState]:
        """Who holds each slot, for reports and tests."""
        return {slot.id: slot.state for slot in self._slots.values()}

    def acquire(self, request_bytes: int, response_bytes: int) -> tuple[Slot | None, list[Slot]]:
        """Return a slot with that much room in state `LEASED`, and the slots retired to make room for it.

        None when every slot is in use: wait for `on_free`.

        Raises:
            BudgetExceeded: it does not fit, even with all other slots free.
            OSError: the system has no memory or no file descriptor for it now.
        """
        request_room, size = _layout(request_bytes, response_bytes)
        if size > self._max_bytes:
            raise BudgetExceeded(
                "a request with its answer",
                needed_bytes=size,
                free_bytes=self._max_bytes,
                ceiling_bytes=self._max_bytes,
            )
        free = [slot for slot in self._slots.values() if slot.state is SlotState.FREE]
        if len(free) > 1:
            free.sort(key=attrgetter("size_bytes"))
        for slot in free:
            if slot.request_bytes >= request_room and slot.size_bytes - slot.request_bytes >= response_bytes:
                slot.move(SlotState.LEASED)
                return slot, []
        retired = []
        while free and not self._has_room(size):
            retired.append(self._retire(free.pop(0)))
        if not self._has_room(size):
            return None, retired
        slot = self._create(request_room, size)
        slot.move(SlotState.LEASED)
        return slot, retired

    def free(self, slot: Slot) -> None:
        """Take a slot back; after `close` its memory is given back at once."""
        slot.move(SlotState.FREE)
        if self._closed:
            self._retire(slot)
        elif self._on_free is not None:
            self._on_free()

    def close(self) -> None:
        """The worker is dead: give back what it held; answers stay until their readers release them."""
        self._closed = True
        for slot in list(self._slots.values()):
            if slot.state in {SlotState.IN_WORKER, SlotState.LEASED}:
                slot.move(SlotState.FREE)
            if slot.state is SlotState.FREE:
                self._retire(slot)

    def _has_room(self, size: int) -> bool:
        return len(self._slots) < self._max_slots and self.size_bytes + size <= self._max_bytes

    def _create(self, request_room: int, size: int) -> Slot:
        fd, view = _map_sealed(size)
        slot = Slot(self._next_id, fd, view, request_room)
        self._next_id += 1
        self._slots[slot.id] = slot
        self._changed()
        return slot

    def _retire(self, slot: Slot) -> Slot:
        slot.move(SlotState.RETIRED)
        del self._slots[slot.id]
        slot.view.release()  # the mapping goes with the last view of it
        os.close(slot.fd)
        self._changed()
        return slot

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change(self.size_bytes)


def _layout(request_bytes: int, response_bytes: int) -> tuple[int, int]:
    request_room = aligned(max(request_bytes, 1), _PAGE)
    return request_room, request_room + aligned(max(response_bytes, 1), _PAGE)


def _map_sealed(size: int) -> tuple[int, memoryview]:
    """Make shared memory of a fixed size: neither side can shrink it under the other (no SIGBUS)."""
    fd = os.memfd_create("edgeinfer-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd, memoryview(mmap.mmap(fd, size))
    except BaseException:
        os.close(fd)
        raise


@dataclass(slots=True)
class SlotLease:
    """Holds an answer in its slot until its reader is done; also a context manager."""

    pool: SlotPool
    slot: Slot
    views: Sequence[memoryview] = ()
    _held: bool = field(default=True, init=False)

    def release(self) -> None:
        """Give the slot back; the answer's views must not be read afterwards (they raise). Idempotent."""
        if self._held:
            self._held = False
            for view in self.views:
                view.release()
            self.pool.free(self.slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class MappedSlots:
    """The worker's mappings of the daemon's slots. Attached by its reader thread, read by its main thread."""

    def __init__(self) -> None:
        self._views: dict[int, memoryview] = {}

    def attach(self, slot: int, fd: int, size_bytes: int) -> None:
        """Map a slot; takes over `fd`.

        Raises:
            ProtocolError: the memory is smaller than announced, or could be shrunk under us.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < size_bytes:
                raise ProtocolError(f"slot {slot} is not sealed memory of {size_bytes} bytes")
            self._views[slot] = memoryview(mmap.mmap(fd, size_bytes))
        finally:
            os.close(fd)

    def detach(self, slot: int) -> None:
        """Forget a slot; its mapping goes with the last view of it."""
        self._views.pop(slot, None)

    def view(self, slot: int) -> memoryview:
        """Return all of a slot.

        Raises:
            ProtocolError: it is not attached.
        """
        try:
            return self._views[slot]
        except KeyError:
            raise ProtocolError(f"slot {slot} is not attached") from None
