"""What deciding alone loses against a scheduler that knows the future, on the overload benchmark's traces."""

from __future__ import annotations

import pytest

from edgeinfer_bench.overload import LOADS, SIZES
from edgeinfer_bench.player import Tally
from edgeinfer_bench.trace import Sizes
from tests.scheduling.simulation import BUSY, COSTLY, QUIET, REALISTIC, Noise, play

SEEDS = (0, 100)


def _play(sizes: Sizes, load: float, noise: Noise, *, begins: bool) -> Tally:
    tally = Tally()
    for seed in SEEDS if noise != QUIET else SEEDS[:1]:
        tally.add(play(sizes, load, noise, seed=seed, begins=begins).tally)
    return tally


@pytest.mark.slow
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("load", LOADS)
def test_service_time_in_time_is_close_to_the_preemptive_clairvoyant_bound(
    sizes: Sizes, load: float, begins: bool
) -> None:
    quiet, noisy = (_play(sizes, load, noise, begins=begins) for noise in (QUIET, REALISTIC))
    assert quiet.ours_ns >= 0.975 * quiet.bound_ns
    assert noisy.ours_ns >= 0.95 * noisy.bound_ns
    assert quiet.broken == 0
    assert quiet.wasted_ns == 0


@pytest.mark.slow
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize(("noise", "floor"), [(BUSY, 0.74), (COSTLY, 0.75)], ids=["busy", "costly"])
def test_what_runs_cost_besides_is_all_that_a_mix_at_three_times_the_capacity_loses_more(
    noise: Noise, floor: float, begins: bool
) -> None:
    tally = _play("mixed", 3.0, noise, begins=begins)
    assert tally.ours_ns >= floor * tally.bound_ns
    assert tally.ran_ns >= 0.95 * tally.wall_ns, "the core was idle"
    assert tally.wasted_ns <= (0.01 if begins else 0.005) * tally.ran_ns


@pytest.mark.slow
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.timeout(300)
@pytest.mark.parametrize("noise", [REALISTIC, BUSY, COSTLY], ids=["realistic", "busy", "costly"])
def test_one_promise_in_a_thousand_is_broken_at_most_and_next_to_nothing_is_wasted(noise: Noise, begins: bool) -> None:
    total = Tally()
    for sizes in SIZES:
        for load in (1.0, 3.0):
            total.add(_play(sizes, load, noise, begins=begins))
    assert total.promised > 4_500
    # 0.1 % and two standard deviations of such a count.
    assert total.broken <= 0.001 * total.promised + 2 * (0.001 * total.promised) ** 0.5
    assert total.wasted_ns <= (0.01 if begins else 0.005) * total.ran_ns
