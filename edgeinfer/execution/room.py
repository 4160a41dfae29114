"""Make room in the memory budget, and give back what models held: reserve, evict, close.

Owns the closing of residents: once begun it is carried through, whatever becomes of who asked for it, because memory
depends on it. What there is to give is the `ledger`'s, who gives way `eviction`'s, when something is loaded
`succession`'s. Whoever calls holds the cache's lock, but for `obey_ceiling`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.errors import BudgetExceeded, mib
from edgeinfer.execution.eviction import Tenant, choose_victims
from edgeinfer.execution.ledger import MemoryLedger, Reservation, SharedReservation
from edgeinfer.execution.resident import ResidentModel
from edgeinfer.execution.wanted import WantedModel

_log = logging.getLogger(__name__)

_DRAIN_NS = 10 * NS_PER_S
"""How long a model that was replaced may take to finish what it has begun; its requests' deadlines end it sooner."""

Mapped = tuple[str, int]
"""Weights that a form maps: whose, and the bytes that are charged once."""


class Room:
    """The memory of a service's models. Loop thread only."""

    def __init__(self, ledger: MemoryLedger, wanted: Mapping[str, WantedModel], *, clock: Clock) -> None:
        """`wanted` is the cache's: who is in memory, and whom to tell that he was evicted."""
        self._ledger = ledger
        self._wanted = wanted
        self._clock = clock
        self._closing: set[asyncio.Task[None]] = set()

    def is_free(self, size_bytes: int, mapped: Mapped | None) -> bool:
        """Whether it fits as things are, with nobody giving way."""
        return self._missing_bytes(size_bytes, mapped) <= 0

    def could_fit(self, wanted: WantedModel, size_bytes: int, mapped: Mapped | None, *, up_to_priority: int) -> bool:
        """Whether it fits once the model's present version and everybody who has to give way are gone."""
        given_bytes = wanted.resident.reserved_bytes if wanted.resident else 0
        missing_bytes = self._missing_bytes(size_bytes, mapped) - given_bytes
        others = [tenant for tenant in self._tenants() if tenant.name != wanted.section.name]
        return missing_bytes <= 0 or bool(
            choose_victims(others, needed_bytes=missing_bytes, up_to_priority=up_to_priority)
        )

    async def reserve(
        self, owner: str, size_bytes: int, mapped: Mapped | None, *, up_to_priority: int
    ) -> tuple[Reservation, SharedReservation | None]:
        """Reserve, evicting idle models of at most that priority when it takes that.

        Raises:
            BudgetExceeded: it doesn't fit; nobody was evicted in vain.
        """
        missing_bytes = self._missing_bytes(size_bytes, mapped)
        if missing_bytes > 0:
            victims = choose_victims(self._tenants(), needed_bytes=missing_bytes, up_to_priority=up_to_priority)
            await self._evict(victims, f"to make room for {owner}")
        reservation = self._ledger.reserve(owner, size_bytes)
        try:
            return reservation, self._ledger.share(*mapped) if mapped else None
        except BudgetExceeded:
            reservation.release()
            raise

    async def obey_ceiling(self) -> None:
        """Evict what no longer fits below a ceiling that was lowered, as far as somebody may go."""
        over_bytes = self._ledger.overdrawn_bytes
        if over_bytes:
            victims = choose_victims(self._tenants(), needed_bytes=over_bytes, partial=True)
            await self._evict(victims, f"because the budget fell to {mib(self._ledger.ceiling_bytes)}")

    async def close(self, wanted: WantedModel) -> None:
        """End what is in memory for a model, now."""
        resident, wanted.resident = wanted.resident, None
        if resident is not None:
            await self._carry_through(resident.section.name, resident)

    async def retire(self, resident: ResidentModel) -> None:
        """End a resident that takes no new requests any more, once it has finished those that it has."""
        await self._carry_through(resident.section.name, resident, drain_ns=_DRAIN_NS)

    async def closed(self) -> None:
        """Return when everything whose end has begun has ended."""
        if self._closing:
            await asyncio.wait(self._closing)

    async def _carry_through(self, name: str, resident: ResidentModel, *, drain_ns: int = 0) -> None:
        async def end() -> None:
            await resident.drain(timeout_ns=drain_ns)
            await resident.close()

        task = asyncio.create_task(end(), name=f"close[{name}]")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        await asyncio.shield(task)

    async def _evict(self, victims: list[Tenant], why: str) -> None:
        for victim in victims:
            wanted = self._wanted[victim.name]
            _log.warning("evicted model=%s freed_bytes=%d why=%r", victim.name, victim.size_bytes, why)
            wanted.evict(why, now_ns=self._clock.now_ns())
            await self.close(wanted)

    def _missing_bytes(self, size_bytes: int, mapped: Mapped | None) -> int:
        needed_bytes = size_bytes + (mapped[1] if mapped else 0)
        return needed_bytes + self._ledger.overdrawn_bytes - self._ledger.free_bytes

    def _tenants(self) -> list[Tenant]:
        return [
            Tenant(
                resident.section.name,
                resident.reserved_bytes,
                resident.section.priority,
                resident.last_used_ns,
                movable=not resident.section.pinned and not resident.leases,
            )
            for wanted in self._wanted.values()
            if (resident := wanted.resident) is not None
        ]
