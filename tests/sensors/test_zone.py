from __future__ import annotations

import pytest
from hypothesis import given
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
    assert temps(80000, 80000, 50000, 49000) == [None, 80000, 80000, 50000]


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
