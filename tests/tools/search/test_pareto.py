"""The winner meets the budget when anything does, the ladder only goes down, and every other form gets its reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer_tools.search.budget import Budget
from edgeinfer_tools.search.pareto import Point, decide, dominates, front

MIB = 1 << 20


def point(name: str, quality: float, size_mib: float, p50_ms: float, peak_mib: float = 50) -> Point:
    p50_us = int(p50_ms * 1000)
    return Point(name, quality, round(1 - quality, 6), int(size_mib * MIB), int(peak_mib * MIB), p50_us, 2 * p50_us)


FLOAT = point("fp32", 1.0, 16, 40, 120)
STATIC = point("static", 0.985, 4, 12)
TENSOR = point("static-tensor", 0.90, 4, 12.1)
SMALL = point("w4", 0.96, 2, 42)
QUICK = point("small-net", 0.95, 3, 5)
ALL = [FLOAT, STATIC, TENSOR, SMALL, QUICK]


def test_without_a_bound_on_the_drop_the_best_quality_within_the_budget_wins() -> None:
    verdict = decide(ALL, Budget(p99_us=30_000), keep=5)
    assert verdict.winner == STATIC
    assert "best quality" in verdict.reason
    assert verdict.why_not["fp32"] == "p99 is 80.00 ms, the bound is 30 ms (167% over)"


def test_with_one_the_quality_may_be_spent_for_speed() -> None:
    verdict = decide(ALL, Budget(drop=0.05), keep=5)
    assert verdict.winner == QUICK
    assert verdict.why_not["static"] == "p50 12.00 ms against 5.00 ms"
    assert verdict.why_not["static-tensor"].startswith("quality drops by 0.1000, 0.05 is allowed")


def test_the_ladder_goes_down_within_the_budget_and_leaves_out_what_another_beats() -> None:
    verdict = decide(ALL, Budget(size_bytes=20 * MIB), keep=5)
    assert [item.name for item in verdict.ladder] == ["fp32", "static", "w4", "small-net"]
    assert [item.name for item in verdict.front] == ["fp32", "static", "w4", "small-net"]
    assert "static-tensor" not in [item.name for item in verdict.ladder]


def test_a_rung_keeps_every_bound() -> None:
    verdict = decide(ALL, Budget(p99_us=30_000, drop=0.02), keep=5)
    assert [item.name for item in verdict.ladder] == ["static"]


@pytest.mark.parametrize(
    ("keep", "names"), [(1, ["fp32"]), (2, ["fp32", "small-net"]), (3, ["fp32", "static", "small-net"])]
)
def test_so_many_variants_are_kept_the_lowest_among_them(keep: int, names: list[str]) -> None:
    assert [item.name for item in decide(ALL, Budget(size_bytes=20 * MIB), keep=keep).ladder] == names


def test_when_nothing_meets_the_budget_the_least_miss_wins_and_is_told() -> None:
    verdict = decide(ALL, Budget(p99_us=8_000), keep=3)
    assert verdict.winner == QUICK
    assert [str(miss) for miss in verdict.misses] == ["p99 is 10.00 ms, the bound is 8 ms (25% over)"]
    assert "no form meets the budget" in verdict.reason


points = st.lists(
    st.builds(
        point,
        st.uuids().map(str),
        st.integers(500, 1000).map(lambda n: n / 1000),
        st.integers(1, 30),
        st.integers(1, 50),
        st.integers(10, 200),
    ),
    min_size=1,
    max_size=12,
)
budgets = st.builds(
    Budget,
    peak_bytes=st.none() | st.integers(10, 200).map(lambda n: n * MIB),
    p99_us=st.none() | st.integers(1000, 100_000),
    size_bytes=st.none() | st.integers(1, 30).map(lambda n: n * MIB),
    drop=st.none() | st.integers(0, 500).map(lambda n: n / 1000),
)


@given(points, budgets, st.integers(1, 5))
def test_promises_that_hold_for_every_search(found: list[Point], budget: Budget, keep: int) -> None:
    verdict = decide(found, budget, keep=keep)
    within = [item for item in found if not budget.misses(item.figures)]
    assert bool(within) == (not verdict.misses)
    assert verdict.ladder[0] == verdict.winner
    assert len(verdict.ladder) <= keep
    assert all(item.quality <= verdict.winner.quality for item in verdict.ladder)
    if within:
        assert not any(budget.misses(item.figures) for item in verdict.ladder)
    for item in verdict.ladder[1:]:
        assert not any(dominates(other, item) for other in verdict.ladder)
    assert set(verdict.why_not) == {item.name for item in found} - {verdict.winner.name}
    assert all(verdict.why_not.values())


@given(points)
def test_what_is_not_on_the_front_is_beaten(found: list[Point]) -> None:
    kept = front(found)
    assert kept
    assert all(any(dominates(other, item) for other in found) for item in found if item not in kept)
