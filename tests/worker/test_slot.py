"""A slot is handed out again only by the worker's acknowledgement or death, and every byte is charged."""

from __future__ import annotations

import mmap
import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from edgeinfer.errors import BudgetExceeded, InternalError, ProtocolError
from edgeinfer.request import Payload
from edgeinfer.worker.messages import Span
from edgeinfer.worker.slot import MappedSlots, Slot, SlotLease, SlotPool, SlotState, body_bytes, read_body, write_body

PAGE = mmap.PAGESIZE


class Pool(RuleBasedStateMachine):
    """Any order of requests, answers, expiries and releases, against a plain model of who holds what."""

    in_worker = Bundle("in_worker")
    results = Bundle("results")

    def __init__(self) -> None:
        super().__init__()
        self.charged = 0
        self.pool = SlotPool(max_slots=3, max_bytes=24 * PAGE, on_change=self._charge)
        self.held: dict[int, Slot] = {}
        self.released: set[int] = set()

    def _charge(self, total_bytes: int) -> None:
        self.charged = total_bytes

    @rule(target=in_worker, request_pages=st.integers(1, 5), response_pages=st.integers(1, 5))
    def send(self, request_pages: int, response_pages: int) -> Slot | None:
        slot, retired = self.pool.acquire(request_pages * PAGE, response_pages * PAGE)
        assert all(old.state is SlotState.RETIRED and old.id not in self.held for old in retired)
        if slot is None:
            assert self.held
            return None
        assert slot.id not in self.held
        assert slot.request_bytes >= request_pages * PAGE
        assert slot.response_room.capacity_bytes >= response_pages * PAGE
        self.held[slot.id] = slot
        slot.move(SlotState.IN_WORKER)
        return slot

    @rule(target=results, slot=consumes(in_worker))
    def answer(self, slot: Slot | None) -> SlotLease | None:
        if slot is None:
            return None
        slot.move(SlotState.RESULT)
        return SlotLease(self.pool, slot)

    @rule(slot=consumes(in_worker))
    def acknowledge_too_late(self, slot: Slot | None) -> None:
        if slot is not None:
            del self.held[slot.id]
            self.pool.free(slot)

    @rule(lease=results)
    def release(self, lease: SlotLease | None) -> None:
        if lease is None:
            return
        if id(lease) not in self.released:
            self.released.add(id(lease))
            del self.held[lease.slot.id]
        lease.release()  # a second time does nothing

    @invariant()
    def everything_is_charged_and_bounded(self) -> None:
        assert self.charged == self.pool.size_bytes <= 24 * PAGE
        assert len(self.pool.states) <= 3

    def teardown(self) -> None:
        self.pool.close()
        for slot in self.held.values():
            if slot.state is SlotState.RESULT:
                self.pool.free(slot)
        assert self.pool.size_bytes == self.charged == 0


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_slot_in_the_worker_cannot_be_taken_by_anybody() -> None:
    pool = SlotPool(max_slots=1, max_bytes=8 * PAGE)
    slot, _ = pool.acquire(1, 1)
    assert slot is not None
    slot.move(SlotState.IN_WORKER)
    assert pool.acquire(1, 1) == (None, [])
    for state in (SlotState.LEASED, SlotState.IN_WORKER, SlotState.RETIRED):
        with pytest.raises(InternalError, match="cannot go from in_worker"):
            slot.move(state)
    pool.close()


def test_request_that_can_never_fit_is_told_the_numbers() -> None:
    pool = SlotPool(max_slots=2, max_bytes=8 * PAGE)
    with pytest.raises(BudgetExceeded) as caught:
        pool.acquire(8 * PAGE, 1)
    assert (caught.value.needed_bytes, caught.value.ceiling_bytes) == (9 * PAGE, 8 * PAGE)
    assert pool.size_bytes == 0


def test_shared_memory_can_be_neither_shrunk_nor_grown_under_the_other_side() -> None:
    pool = SlotPool(max_slots=1, max_bytes=8 * PAGE)
    slot, _ = pool.acquire(1, 1)
    assert slot is not None
    for size in (0, PAGE, 4 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(slot.fd, size)
    pool.close()


def test_worker_maps_only_sealed_memory_of_the_announced_size() -> None:
    mapped = MappedSlots()
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, PAGE)
    with pytest.raises(ProtocolError, match="not sealed"):
        mapped.attach(1, os.dup(unsealed), PAGE)
    os.close(unsealed)
    pool = SlotPool(max_slots=1, max_bytes=8 * PAGE)
    slot, _ = pool.acquire(1, 1)
    assert slot is not None
    with pytest.raises(ProtocolError, match="of 12288 bytes"):
        mapped.attach(1, os.dup(slot.fd), 3 * PAGE)
    mapped.attach(1, os.dup(slot.fd), slot.size_bytes)
    slot.view[5] = 77
    assert mapped.view(1)[5] == 77
    mapped.detach(1)
    with pytest.raises(ProtocolError, match="not attached"):
        mapped.view(1)
    pool.close()


def test_body_comes_back_as_it_was_written_with_tensors_aligned() -> None:
    payload = Payload(b'{"inputs":[]}', (b"abc", memoryview(bytes(range(100)))))
    area = memoryview(bytearray(4096))
    span = write_body(area, 3, 64, payload)
    assert span.body_offset % 64 == 0
    assert span.body_offset + span.body_bytes <= 64 + body_bytes(payload)
    header, body = read_body(area, span)
    assert (bytes(header), bytes(body)) == (payload.header, b"abc" + bytes(range(100)))


@pytest.mark.parametrize(
    "span", [Span(1, 0, 10, 4, 1), Span(1, -1, 1, 64, 1), Span(1, 0, 1, 64, 5000), Span(1, 0, 5000, 6000, 0)]
)
def test_span_outside_of_its_slot_is_refused(span: Span) -> None:
    with pytest.raises(ProtocolError, match="does not lie inside slot 1"):
        read_body(memoryview(bytearray(4096)), span)
