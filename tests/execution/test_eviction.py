"""Who gives way, as properties over every set of tenants."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.execution.eviction import Tenant, choose_victims

tenants = st.lists(
    st.builds(
        Tenant,
        name=st.uuids().map(str),
        size_bytes=st.integers(0, 100),
        priority=st.integers(-2, 2),
        last_used_ns=st.integers(0, 5),
        movable=st.booleans(),
    ),
    max_size=8,
)


@given(tenants, st.integers(0, 400), st.none() | st.integers(-3, 3))
def test_enough_or_nobody_and_never_more_than_needed(all_tenants: list[Tenant], needed: int, up_to: int | None) -> None:
    victims = choose_victims(all_tenants, needed_bytes=needed, up_to_priority=up_to)
    assert all(victim.movable for victim in victims)
    assert all(up_to is None or victim.priority <= up_to for victim in victims)
    freed = sum(victim.size_bytes for victim in victims)
    if victims:
        assert freed >= needed > freed - victims[-1].size_bytes, "the last one was needed"
    else:
        may = [t for t in all_tenants if t.movable and (up_to is None or t.priority <= up_to)]
        assert needed == 0 or sum(tenant.size_bytes for tenant in may) < needed


@given(tenants, st.integers(0, 400))
def test_the_least_important_and_longest_unused_goes_first(all_tenants: list[Tenant], needed: int) -> None:
    victims = choose_victims(all_tenants, needed_bytes=needed, partial=True)
    spared = [t for t in all_tenants if t.movable and t not in victims]
    for victim in victims:
        for other in spared:
            assert (victim.priority, victim.last_used_ns) <= (other.priority, other.last_used_ns)


@given(tenants, st.integers(1, 10_000))
def test_under_pressure_everything_that_may_go_goes(all_tenants: list[Tenant], beyond: int) -> None:
    movable = [tenant for tenant in all_tenants if tenant.movable]
    needed = sum(tenant.size_bytes for tenant in movable) + beyond
    assert len(choose_victims(all_tenants, needed_bytes=needed, partial=True)) == len(movable)
    assert choose_victims(all_tenants, needed_bytes=needed) == []
