"""Decide who gives way when memory is short. Pure; `model_cache` carries it out.

Lowest priority first, then least recently used; never who is pinned or has a request running.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """A model in memory, as far as giving way is concerned."""

    name: str
    size_bytes: int
    priority: int
    last_used_ns: int
    movable: bool
    """Neither pinned nor leased."""


def choose_victims(
    tenants: Iterable[Tenant], *, needed_bytes: int, up_to_priority: int | None = None, partial: bool = False
) -> list[Tenant]:
    """Return who must go so that `needed_bytes` become free, in order; nobody when all of them together don't do.

    `up_to_priority` spares those above it. With `partial`, as much as can be had is taken where all isn't enough.
    """
    order = sorted(
        (t for t in tenants if t.movable and (up_to_priority is None or t.priority <= up_to_priority)),
        key=lambda tenant: (tenant.priority, tenant.last_used_ns),
    )
    victims: list[Tenant] = []
    freed_bytes = 0
    for tenant in order:
        if freed_bytes >= needed_bytes:
            break
        victims.append(tenant)
        freed_bytes += tenant.size_bytes
    return victims if partial or freed_bytes >= needed_bytes else []
