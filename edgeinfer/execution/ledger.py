"""Keep the memory promise: no byte is used for a model that was not reserved first, and never more than the ceiling.

Owns the reservations. It counts promises, not what /proc shows: a model is charged its peak before it loads, so two
loads can never race past the ceiling. Who gets evicted to make room is `model_cache`; what the kernel says is left is
`sensors.memory`; `budget_bytes` turns the latter into a ceiling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer.errors import BudgetExceeded, InternalError

OURSELVES = "edgeinfer itself"
"""The owner of what daemon and zygote take."""
OUTGROWN = "beyond their reservations"
"""The owner of what workers take above what was reserved for them, until they have been shrunk or replaced."""


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """What was promised at one moment, in bytes."""

    ceiling_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int
    """The most that was ever reserved at once."""
    by_owner: dict[str, int]
    """Reserved bytes of each owner that holds any."""
    refusals: int
    """Reservations (and growths) that did not fit."""
    why_lowered: str = ""
    """Why the ceiling is below the configured one: what the system has left, or memory pressure, with the numbers."""

    @property
    def free_bytes(self) -> int:
        """What may still be reserved; 0 when the ceiling was lowered below what is reserved."""
        return max(0, self.ceiling_bytes - self.reserved_bytes)


class Reservation:
    """Bytes that the ledger has set aside for one owner, until they are released."""

    __slots__ = ("_ledger", "_size_bytes", "owner")

    def __init__(self, ledger: MemoryLedger, owner: str, size_bytes: int) -> None:
        self._ledger = ledger
        self._size_bytes = size_bytes
        self.owner = owner

    @property
    def size_bytes(self) -> int:
        """Bytes held; 0 once released."""
        return self._size_bytes

    def resize(self, size_bytes: int) -> None:
        """Hold `size_bytes` from now on. Shrinking always succeeds, also above a lowered ceiling.

        Raises:
            BudgetExceeded: the growth does not fit; the reservation is as it was.
            InternalError: it was released before.
        """
        self._ledger.move(self, size_bytes)
        self._size_bytes = size_bytes

    def follow(self, size_bytes: int) -> None:
        """Hold `size_bytes`, which are in use already, whether they fit or not: a fact cannot be refused.

        What is then above the ceiling is overdrawn, and eviction has to bring it back.

        Raises:
            InternalError: it was released before.
        """
        self._ledger.move(self, size_bytes, is_fact=True)
        self._size_bytes = size_bytes

    def release(self) -> None:
        """Give the bytes back. Calling it again does nothing."""
        self._ledger.drop(self)
        self._size_bytes = 0


class SharedReservation:
    """One holder's part in bytes that are charged once, however many hold them (mapped weights)."""

    __slots__ = ("_held", "_ledger", "what")

    def __init__(self, ledger: MemoryLedger, what: str) -> None:
        self._ledger = ledger
        self._held = True
        self.what = what

    def release(self) -> None:
        """Let go; the bytes return with the last holder. Calling it again does nothing."""
        if self._held:
            self._held = False
            self._ledger.let_go(self.what)


class MemoryLedger:
    """Ledger of the bytes that resident models, their slots and their mapped weights may use.

    Loop thread only. Lowering the ceiling does not evict: it makes later reservations fail.
    """

    def __init__(self, ceiling_bytes: int) -> None:
        if ceiling_bytes < 0:
            raise InternalError(f"a ledger's ceiling of {ceiling_bytes} bytes is below zero")
        self._ceiling_bytes = ceiling_bytes
        self._why_lowered = ""
        self._live: set[Reservation] = set()
        self._standing: set[Reservation] = set()
        self._by_owner: Counter[str] = Counter()
        self._shared: dict[str, tuple[Reservation, int]] = {}
        self._reserved_bytes = 0
        self._peak_bytes = 0
        self._refusals = 0

    @property
    def ceiling_bytes(self) -> int:
        """What may be reserved in all."""
        return self._ceiling_bytes

    @property
    def free_bytes(self) -> int:
        """What may still be reserved, never below 0."""
        return max(0, self._ceiling_bytes - self._reserved_bytes)

    @property
    def overdrawn_bytes(self) -> int:
        """What is reserved above a ceiling that was lowered since: what eviction should bring back."""
        return max(0, self._reserved_bytes - self._ceiling_bytes)

    @property
    def standing_bytes(self) -> int:
        """What is reserved for what is there as long as the service is: unloading models does not bring it back."""
        return sum(reservation.size_bytes for reservation in self._standing)

    def reserve(self, owner: str, size_bytes: int, *, standing: bool = False) -> Reservation:
        """Set aside `size_bytes` for `owner` until the reservation is released; `standing` when no model holds it.

        Raises:
            BudgetExceeded: it does not fit. Nothing was reserved.
        """
        reservation = Reservation(self, owner, size_bytes)
        self._charge(owner, size_bytes)
        self._live.add(reservation)
        if standing:
            self._standing.add(reservation)
        return reservation

    def share(self, what: str, size_bytes: int) -> SharedReservation:
        """Hold a part in `what`, whose bytes are charged with its first holder and given back with its last.

        `size_bytes` counts for the first holder only: for the same file it is always the same.

        Raises:
            BudgetExceeded: the first holder's charge does not fit. Nothing was reserved.
        """
        reservation, holders = self._shared.get(what) or (self.reserve(what, size_bytes), 0)
        self._shared[what] = (reservation, holders + 1)
        return SharedReservation(self, what)

    def set_ceiling(self, ceiling_bytes: int) -> None:
        """Change what may be reserved in all; what is reserved stays reserved. Below zero means zero."""
        self._ceiling_bytes = max(0, ceiling_bytes)

    def explain(self, why_lowered: str) -> None:
        """Say why the ceiling is below the configured one, for refusals and reports; empty when it isn't."""
        self._why_lowered = why_lowered

    def snapshot(self) -> LedgerSnapshot:
        """Return the ledger as it is now."""
        by_owner = {owner: size for owner, size in self._by_owner.items() if size}
        return LedgerSnapshot(
            self._ceiling_bytes, self._reserved_bytes, self._peak_bytes, by_owner, self._refusals, self._why_lowered
        )  # fmt: skip

    def move(self, reservation: Reservation, size_bytes: int, *, is_fact: bool = False) -> None:
        """Serve `Reservation.resize`, and `follow` with `is_fact`."""
        if reservation not in self._live:
            raise InternalError(f"{reservation.owner}: a released reservation cannot be resized to {size_bytes} bytes")
        if size_bytes < 0:
            raise InternalError(f"{reservation.owner}: cannot reserve {size_bytes} bytes")
        growth_bytes = size_bytes - reservation.size_bytes
        if growth_bytes > 0:
            self._charge(reservation.owner, growth_bytes, is_fact=is_fact)
        else:
            self._give_back(reservation.owner, -growth_bytes)

    def drop(self, reservation: Reservation) -> None:
        """Serve `Reservation.release`."""
        if reservation in self._live:
            self._live.remove(reservation)
            self._standing.discard(reservation)
            self._give_back(reservation.owner, reservation.size_bytes)

    def let_go(self, what: str) -> None:
        """Serve `SharedReservation.release`."""
        reservation, holders = self._shared.pop(what)
        if holders > 1:
            self._shared[what] = (reservation, holders - 1)
        else:
            reservation.release()

    def _charge(self, owner: str, size_bytes: int, *, is_fact: bool = False) -> None:
        if size_bytes < 0:
            raise InternalError(f"{owner}: cannot reserve {size_bytes} bytes")
        if size_bytes and not is_fact and self._reserved_bytes + size_bytes > self._ceiling_bytes:
            self._refusals += 1
            raise BudgetExceeded(
                owner,
                needed_bytes=size_bytes,
                free_bytes=self.free_bytes,
                ceiling_bytes=self._ceiling_bytes,
                held_bytes=self._by_owner,
                why_lowered=self._why_lowered,
                unloadable_bytes=self._reserved_bytes - self.standing_bytes,
            )
        self._reserved_bytes += size_bytes
        self._peak_bytes = max(self._peak_bytes, self._reserved_bytes)
        self._by_owner[owner] += size_bytes

    def _give_back(self, owner: str, size_bytes: int) -> None:
        self._reserved_bytes -= size_bytes
        self._by_owner[owner] -= size_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner]


def budget_bytes(
    *,
    configured_ceiling: int | None,
    own_bytes: int,
    available_bytes: int,
    cgroup_headrooms: Sequence[tuple[int, int]],
    reserve: int,
) -> int:
    """Return how many bytes our models may use: the least of what was configured and what the system has.

    Args:
        configured_ceiling: the operator's or the board's ceiling; None when there is none.
        own_bytes: what our workers hold already: it is part of the budget, not of what others took.
        available_bytes: MemAvailable of the machine.
        cgroup_headrooms: (limit, usage) of each ancestor cgroup that has a limit.
        reserve: what must stay free for everybody else.

    Never below zero.
    """
    bounds = [available_bytes + own_bytes - reserve]
    bounds += [limit - usage + own_bytes - reserve for limit, usage in cgroup_headrooms]
    if configured_ceiling is not None:
        bounds.append(configured_ceiling)
    return max(0, min(bounds))
