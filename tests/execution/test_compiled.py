"""The form that is chosen is the leanest that is right and no slower; without a reason to change, plain stays."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from edgeinfer.artifact.manifest import Variant
from edgeinfer.execution.compiled import LATENCY_MARGIN, charged_bytes, choose_form, peak_bytes
from edgeinfer.store.compiled import FormCost

MIB = 1 << 20
PLAIN = FormCost(form="plain", load_ms=400, peak_bytes=260 * MIB, steady_bytes=210 * MIB, covers_largest=True)
PREPACKED = FormCost(
    form="prepacked",
    load_ms=180,
    peak_bytes=45 * MIB,
    steady_bytes=18 * MIB,
    hot_bytes=200 * MIB,
    disk_bytes=400 * MIB,
    latencies_us=[14_000, 20_000],
    plain_latencies_us=[14_000, 22_000],
    covers_largest=True,
)
MAPPED = structs.replace(PREPACKED, form="mapped", load_ms=5, disk_bytes=200 * MIB)


def but(cost: FormCost, **changes: Any) -> FormCost:
    return structs.replace(cost, **changes)


def test_equal_latency_the_one_that_loads_fastest_wins() -> None:
    choice = choose_form(PLAIN, [PREPACKED, MAPPED])
    assert choice.cost.form == "mapped"
    assert choice.why == "18 MiB anonymous instead of 210 MiB, loads in 5 ms instead of 400"


def test_form_that_is_slower_at_the_largest_shape_only_is_not_chosen() -> None:
    choice = choose_form(PLAIN, [PREPACKED, but(MAPPED, latencies_us=[13_000, 52_800])])
    assert choice.cost.form == "prepacked"
    assert "mapped: 52.80 ms a run instead of 22.00" in choice.why


def test_raw_weights_need_the_largest_shape_and_packed_ones_do_not() -> None:
    choice = choose_form(PLAIN, [but(PREPACKED, covers_largest=False), but(MAPPED, covers_largest=False)])
    assert choice.cost.form == "prepacked"
    assert "mapped: not timed at the largest shape" in choice.why


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        ({"problem": "golden_mismatch: output 'y' differs by 0.5"}, "golden_mismatch"),
        ({"latencies_us": [0, 0]}, "not timed"),
        ({"latencies_us": []}, "not timed"),
        ({"latencies_us": [13_000, 0]}, "a request failed that the plain form answers"),
    ],
)
def test_plain_stays_when_the_others_are_not_right(problem: dict[str, Any], told: str) -> None:
    choice = choose_form(PLAIN, [but(PREPACKED, **problem), but(MAPPED, **problem)])
    assert choice.cost is PLAIN
    assert told in choice.why


def test_plain_stays_when_there_is_nothing_to_gain() -> None:
    lean = but(PLAIN, steady_bytes=20 * MIB, load_ms=200)
    choice = choose_form(lean, [but(PREPACKED, load_ms=190)])
    assert (choice.cost, choice.why) == (lean, "the other forms save too little")
    assert choose_form(PLAIN, []).cost is PLAIN


def test_margin_is_where_equal_ends() -> None:
    limit_us = round(22_000 * (1 + LATENCY_MARGIN))
    assert choose_form(PLAIN, [but(MAPPED, latencies_us=[14_000, limit_us])]).cost.form == "mapped"
    assert choose_form(PLAIN, [but(MAPPED, latencies_us=[14_000, limit_us + 1])]).cost is PLAIN


costs = st.builds(
    FormCost,
    form=st.sampled_from(["prepacked", "mapped"]),
    problem=st.sampled_from(["", "golden_mismatch"]),
    load_ms=st.floats(1, 1000),
    steady_bytes=st.integers(0, 1 << 30),
    latencies_us=st.lists(st.integers(0, 100_000), min_size=2, max_size=2),
    plain_latencies_us=st.lists(st.integers(1, 100_000), min_size=2, max_size=2),
    covers_largest=st.booleans(),
)


@given(st.lists(costs, max_size=2))
def test_what_is_chosen_is_right_and_as_fast_and_takes_no_more_memory(others: list[FormCost]) -> None:
    chosen = choose_form(PLAIN, others).cost
    if chosen is PLAIN:
        return
    assert not chosen.problem
    assert chosen.steady_bytes <= PLAIN.steady_bytes + 4 * MIB
    assert all(chosen.latencies_us)
    for before_us, now_us in zip(chosen.plain_latencies_us, chosen.latencies_us, strict=True):
        assert now_us <= before_us * (1 + LATENCY_MARGIN)
    assert chosen.form == "prepacked" or chosen.covers_largest


def test_charge_is_the_measured_peak_and_a_quarter_when_the_largest_shape_was_run() -> None:
    assert charged_bytes(PLAIN, PREPACKED, 300 * MIB) == 45 * MIB + 45 * MIB // 4
    assert charged_bytes(PLAIN, PLAIN, 300 * MIB) == 300 * MIB


def test_charge_takes_only_the_weights_off_what_is_declared_when_it_was_not() -> None:
    unsure = but(PREPACKED, covers_largest=False)
    assert charged_bytes(PLAIN, unsure, 300 * MIB) == 300 * MIB - (210 - 18) * MIB


@given(st.builds(but, st.just(PREPACKED), peak_bytes=st.integers(0, 1 << 31), covers_largest=st.booleans()))
def test_charge_is_never_more_than_what_is_declared_unless_more_was_measured_here(cost: FormCost) -> None:
    charged = charged_bytes(PLAIN, cost, 300 * MIB)
    assert 0 <= charged <= max(300 * MIB, cost.peak_bytes)
    assert not cost.covers_largest or charged >= cost.peak_bytes


@pytest.mark.parametrize(
    ("measured", "charged"),
    [
        (None, 300),  # nothing was measured here: what the toolchain says
        ((200, True), 250),  # the largest shape was run: its peak and a quarter
        ((290, True), 362),
        ((200, False), 300),  # smaller shapes were: they say nothing about the largest ...
        ((310, False), 310),  # ... unless they took more already
    ],
)
def test_a_model_as_it_came_is_charged_by_what_was_measured_here(
    measured: tuple[int, bool] | None, charged: int
) -> None:
    variant = Variant(name="fp32", file="model.onnx", quality=1.0, load_peak_bytes=300 * MIB, steady_bytes=MIB)
    here = None if measured is None else (measured[0] * MIB, measured[1])
    assert peak_bytes(None, variant, here) // MIB == charged
