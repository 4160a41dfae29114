"""A budget is read completely, every problem at once, and says by how much it is missed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.errors import ConfigError
from edgeinfer_tools.search.budget import Budget, Figures, budget_of, parse_budget


def test_every_bound_is_optional() -> None:
    full = Budget(peak_bytes=64 << 20, p99_us=30_000, threads=2, size_bytes=8 << 20, drop=0.01)
    assert parse_budget("peak=64MiB,p99=30ms@2,size=8MiB,drop=0.01") == full
    assert parse_budget("p99=1.5 s") == Budget(p99_us=1_500_000)
    assert parse_budget("drop=2%") == Budget(drop=0.02)
    assert budget_of({"peak": "64 MiB", "drop": 0}, "recipe") == Budget(peak_bytes=64 << 20, drop=0.0)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", ["KEY=VALUE"]),
        ("peak", ["peak: write KEY=VALUE"]),
        ("peak=64MiB,peak=1MiB", ["peak: is there twice"]),
        ("peek=64MiB", ["peek: is no bound (peak, p99, size, drop)"]),
        ("size=big,p99=30,drop=1.5", ["size: 'big'", "p99: '30' is no latency", "drop: '1.5'"]),
        ("p99=30ms@0", ["0 threads"]),
        ("size=0", ["size: '0'"]),
        ("drop=nan", ["'nan'"]),
    ],
)
def test_every_problem_is_told(text: str, wrong: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_budget(text)
    for part in wrong:
        assert part in str(caught.value)


def test_an_empty_table_is_no_budget() -> None:
    with pytest.raises(ConfigError, match="needs at least one bound"):
        budget_of({}, "recipe.toml [budget]")


def test_a_miss_says_which_bound_and_by_how_much() -> None:
    budget = parse_budget("peak=64MiB,p99=30ms@2,size=8MiB,drop=0.01")
    told = [str(miss) for miss in budget.misses(Figures(0.05, 10 << 20, 65 << 20, 45_000))]
    assert told == [
        "quality drops by 0.0500, 0.01 is allowed (400% over)",
        "size is 10 MiB, the bound is 8.0 MiB (25% over)",
        "peak memory is 65 MiB, the bound is 64 MiB (2% over)",
        "p99 is 45.00 ms, the bound is 30 ms (50% over)",
    ]


def test_what_is_not_known_misses_nothing() -> None:
    assert parse_budget("peak=1MiB,drop=0").misses(Figures(drop=0.0)) == ()


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_a_bound_is_missed_exactly_when_it_is_passed(value: int, limit: int) -> None:
    assert bool(Budget(size_bytes=limit).misses(Figures(size_bytes=value))) == (value > limit)
