from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from edgeinfer.sensors.state import SensorState
from edgeinfer.sensors.zone import HIGHEST_MC, JUMP_MC, LOWEST_MC, Belief, Fault, frozen, observe, parse_temp, watch

MISSING = Fault(SensorState.MISSING, "No such device")


def believe(*samples: int | str | Fault) -> list[Belief]:
    beliefs, belief = [], Belief()
    for sample in samples:
        belief = observe(belief, parse_temp(sample) if isinstance(sample, str) else sample)
        beliefs.append(belief)
    return beliefs


def temps(*samples: int | str | Fault) -> list[int | None]:
    return [belief.temp_mc for belief in believe(*samples)]


def states(*samples: int | str | Fault) -> list[str]:
    return [belief.state.value for belief in believe(*samples)]


def test_bogus_samples_between_good_ones_are_never_believed() -> None:
    # A Raspberry Pi has shown exactly these.
    samples = ["51000", "85000", "51000", "-650788984", "51000"]
    assert temps(*samples) == [None, None, 51000, 51000, 51000]
    assert temps("51000", *samples) == [None, 51000, 51000, 51000, 51000, 51000]
    assert not any(belief.state.fault for belief in believe(*samples))


def test_first_sample_waits_for_the_second() -> None:
    assert believe(51000)[0].state is SensorState.UNCONFIRMED
    assert temps(85000, 51000, 51000) == [None, None, 51000]


def test_jump_is_believed_when_the_next_sample_confirms_it() -> None:
    assert temps(50000, 50000, 72000, 74000) == [None, 50000, 50000, 72000]
    assert temps(80000, 80000, 65000, 64000, 63000, 62000) == [None, 80000, 80000, 80000, 80000, 65000]
    assert temps(80000, 80000, 65000, 64000, 63000, 80000)[-1] == 80000


@pytest.mark.parametrize("cold", [20000, 40000, 1000])
def test_a_fall_that_no_board_could_make_is_a_fault_until_it_has_stood_for_long(cold: int) -> None:
    found = believe(95000, 95000, *[cold] * 602)
    assert [belief.state for belief in found[2:4]] == [SensorState.UNCONFIRMED, SensorState.ABSURD]
    assert found[2].temp_mc == 95000
    assert all(belief.temp_mc is None for belief in found[3:602])
    assert "fall that no board could make" in found[3].detail
    assert (found[-1].state, found[-1].temp_mc) == (SensorState.OK, cold)


def test_a_fault_between_does_not_make_an_impossible_fall_possible() -> None:
    assert states(95000, 95000, MISSING, MISSING, 20000, 20000, 20000)[-1] == "absurd"
    assert states(95000, 95000, MISSING, MISSING, 94000, 94000)[-1] == "ok"


def test_who_comes_back_from_an_impossible_fall_is_believed_again() -> None:
    assert temps(95000, 95000, *[20000] * 30, 60000, 60000)[-1] == 60000
    assert temps(95000, 95000, *[20000] * 5, 94000, 94000)[-1] == 94000


@pytest.mark.parametrize("time_constant_s", [12, 150])
def test_a_board_that_cools_from_the_worst_is_followed(time_constant_s: int) -> None:
    belief = Belief()
    for second in range(600):
        real = round(25000 + 72000 * math.exp(-max(0, second - 5) / time_constant_s))
        belief = observe(belief, real)
        assert not belief.state.fault
        assert second < 1 or abs((belief.temp_mc or 0) - real) <= JUMP_MC


def test_slow_sampling_lets_it_cool_between_two_samples() -> None:
    belief = Belief()
    for sample, seconds in [(95000, 0), (95000, 1), *[(40000, 30)] * 4]:
        belief = observe(belief, sample, seconds * 1_000_000_000)
    assert belief.temp_mc == 40000


def test_exactly_zero_is_a_placeholder_unless_it_was_approached() -> None:
    assert states(*[0] * 1000)[-1] == "absurd"
    assert states(95000, 95000, *[0] * 1000)[-1] == "absurd"
    assert states(25000, 25000, *[0] * 10)[-1] == "absurd"
    assert temps(4000, 4000, 1000, 0, -1000, 0)[-3:] == [0, -1000, 0]


def test_steep_ramp_is_followed_with_one_sample_delay() -> None:
    assert temps(40000, 40000, 56000, 72000, 88000, 104000)[-1] == 88000


def test_jumping_about_is_absurd_after_four_samples() -> None:
    found = states(50000, 50000, 90000, 10000, 90000, 10000)
    assert found[-2:] == ["unconfirmed", "absurd"]


def test_single_fault_is_bridged_and_the_second_counts() -> None:
    assert states(50000, 50000, MISSING, 50000) == ["unconfirmed", "ok", "unconfirmed", "ok"]
    assert temps(50000, 50000, MISSING, MISSING) == [None, 50000, 50000, None]
    assert states(50000, 50000, MISSING, MISSING)[-1] == "missing"


def test_after_a_fault_two_samples_are_needed_again() -> None:
    assert states(50000, 50000, MISSING, MISSING, 50000, 50000)[-2:] == ["missing", "ok"]


def test_zone_that_fails_from_the_start_is_a_fault_at_the_second_sample() -> None:
    assert states(MISSING, MISSING) == ["unconfirmed", "missing"]


@pytest.mark.parametrize("text", ["", "garbage", "4x", "-273150", "-650788984", "126000", "9999999", "51.5", "None"])
def test_implausible_text_is_absurd(text: str) -> None:
    sample = parse_temp(text)
    assert isinstance(sample, Fault)
    assert sample.state is SensorState.ABSURD
    assert text[:40] in sample.detail


@given(st.lists(st.integers(LOWEST_MC, HIGHEST_MC) | st.just(MISSING) | st.just(Fault(SensorState.ABSURD, "x"))))
def test_value_is_always_a_sample_that_came(samples: list[int | Fault]) -> None:
    for index, belief in enumerate(believe(*samples)):
        assert (belief.temp_mc is None) or belief.temp_mc in samples[: index + 1]
        assert not (belief.state.fault and belief.temp_mc is not None)


@given(
    st.integers(LOWEST_MC + JUMP_MC, HIGHEST_MC - JUMP_MC),
    st.lists(st.integers(-JUMP_MC // 2, JUMP_MC // 2), min_size=2, max_size=30),
    st.integers(0, 29),
    st.integers(-2_000_000_000, 2_000_000_000) | st.just(None),
)
def test_one_bogus_sample_anywhere_changes_nothing_by_more_than_the_noise(
    base: int, noise: list[int], position: int, bogus: int | None
) -> None:
    good: list[int | str | Fault] = [base + item for item in noise]
    index = min(max(position, 2), len(good))
    samples: list[int | str | Fault] = [
        *good[:index], MISSING if bogus is None else str(bogus), *good[index:], base,
    ]  # fmt: skip
    assume(0 not in samples and "0" not in samples)  # a placeholder, wherever it comes from nowhere
    for temp in temps(*samples)[1:]:
        assert temp is not None
        assert abs(temp - base) <= 3 * JUMP_MC // 2


def test_constant_value_while_the_load_moves_is_frozen() -> None:
    still = None
    for second in range(200):
        busy = 0.9 if second > 60 else 0.0
        still = watch(still, 45000, busy, second * 1_000_000_000)
        if second == 110:
            assert not frozen(still)
    assert still is not None
    assert frozen(still)
    assert not frozen(watch(still, 45100, 0.9, 200_000_000_000))


def test_constant_value_at_idle_is_no_fault() -> None:
    still = None
    for second in range(7200):
        still = watch(still, 45000, 0.02, second * 1_000_000_000)
    assert still is not None
    assert not frozen(still)


def test_constant_value_at_steady_load_is_frozen_after_ten_minutes() -> None:
    still = None
    for second in range(601):
        assert still is None or not frozen(still)
        still = watch(still, 45000, 0.8, second * 1_000_000_000)
    assert still is not None
    assert frozen(still)
