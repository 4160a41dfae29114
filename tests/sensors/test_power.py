from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.sensors.energy import EnergyState, add_sample
from edgeinfer.sensors.meter import PowerMeter, PowerReading
from edgeinfer.sensors.power import PowerSample, choose, find_domains, find_rails, read_power
from edgeinfer.sensors.probe import InlineProbe, Waiting
from edgeinfer.sensors.state import SensorState
from tests.sensors.boards import chip, domain, jetson_orin_nano, n100
from tests.sensors.tree import FakeClock, FakeTree

S = 1_000_000_000
RANGE_UJ = 262_143_328_850


def watts(power_mw: int) -> PowerSample:
    return PowerSample(power_mw, None)


def counter(energy_uj: int) -> PowerSample:
    return PowerSample(None, energy_uj)


# Finding and reading


def test_rails_of_an_ina3221_are_voltage_times_current(tree: FakeTree) -> None:
    jetson_orin_nano(tree)
    rails = find_rails(tree.sys)
    assert [(rail.name, read_power(rail).power_mw) for rail in rails] == [
        ("VDD_IN", 7008), ("VDD_CPU_GPU_CV", 2106), ("VDD_SOC", 1658),
    ]  # fmt: skip


def test_rail_of_an_ina226_is_its_power(tree: FakeTree) -> None:
    chip(tree, 0, "ina226", in1_input=5000, curr1_input=900, power1_input=4_525_000)
    (rail,) = find_rails(tree.sys)
    assert (rail.name, read_power(rail).power_mw) == ("ina226/power1", 4525)


def test_voltages_without_current_or_label_are_no_rail(tree: FakeTree) -> None:
    chip(tree, 0, "nct6798", in0_input=1000, in1_label="Vcore", in1_input=900)
    chip(tree, 1, "ina219", in1_input=5000, curr1_input=100)
    assert find_rails(tree.sys) == []


def test_energy_domains_are_parents_first_and_not_twice(tree: FakeTree) -> None:
    n100(tree)
    domain(tree, "intel-rapl:1", "psys", 5)
    assert [item.name for item in find_domains(tree.sys)] == ["package-0", "psys", "core"]


def test_choice_follows_the_board_file_and_else_what_tells_of_the_whole_board(tree: FakeTree) -> None:
    n100(tree)
    rails, domains = find_rails(tree.sys), find_domains(tree.sys)
    assert getattr(choose(rails, domains, ["nosuch", "core"]), "name", "") == "core"
    assert getattr(choose(rails, domains, []), "name", "") == "package-0"
    assert choose([], [item for item in domains if item.name == "core"], []) is None


@pytest.mark.parametrize("text", ["", "garbage", "1.5"])
def test_rail_that_says_no_number_is_an_error(tree: FakeTree, text: str) -> None:
    chip(tree, 0, "ina226", power1_input=text)
    with pytest.raises(OSError, match="is not a number"):
        read_power(find_rails(tree.sys)[0])


def test_rail_that_says_more_than_any_board_draws_is_an_error(tree: FakeTree) -> None:
    chip(tree, 0, "ina226", power1_input=4_294_967_295_000)
    with pytest.raises(OSError, match="more than any board draws"):
        read_power(find_rails(tree.sys)[0])


def test_current_that_flows_back_is_none(tree: FakeTree) -> None:
    chip(tree, 0, "ina3221", in1_label="VDD_IN", in1_input=5000, curr1_input=-8)
    assert read_power(find_rails(tree.sys)[0]).power_mw == 0


# Joules


@pytest.mark.parametrize(
    ("before", "after", "seconds", "range_uj", "joules"),
    [
        (watts(4000), watts(6000), 2, 0, 10.0),
        (watts(4000), watts(6000), 11, 0, None),  # nobody knows what it drew meanwhile
        (counter(1_000_000), counter(4_500_000), 1, RANGE_UJ, 3.5),
        (counter(1_000_000), counter(4_500_000), 3600, RANGE_UJ, 3.5),  # a counter bridges any gap
        (counter(RANGE_UJ - 999_999), counter(2_000_000), 1, RANGE_UJ, 3.0),  # around
        (counter(RANGE_UJ), counter(0), 1, RANGE_UJ, 0.000001),
        (counter(5_000_000), counter(1_000_000), 1, RANGE_UJ, None),  # set back: a whole turn in a second cannot be
        (counter(5_000_000), counter(1_000_000), 1, 0, None),
        (counter(5_000_000), counter(9_000_000_000), 1, RANGE_UJ, None),  # it jumped
        (counter(5_000_000), watts(4000), 1, RANGE_UJ, None),
        (None, watts(4000), 1, 0, None),
        (watts(4000), None, 1, 0, None),
    ],
)
def test_joules_of_an_interval(
    before: PowerSample | None, after: PowerSample | None, seconds: int, range_uj: int, joules: float | None
) -> None:
    state, _ = add_sample(EnergyState(), before, 0, range_uj)
    state, interval = add_sample(state, after, seconds * S, range_uj)
    assert (interval.joules if interval else None) == pytest.approx(joules)
    assert state.total_j == pytest.approx(joules or 0.0)
    assert state.known_s == (seconds if joules is not None else 0)


@given(st.lists(st.integers(0, 20_000_000), min_size=1, max_size=40), st.integers(0, 49_999_999))
def test_counter_that_goes_around_loses_nothing(steps: list[int], start: int) -> None:
    range_uj = 49_999_999
    value, state = start, add_sample(EnergyState(), counter(start), 0, range_uj)[0]
    for index, step in enumerate(steps, 1):
        value = (value + step) % (range_uj + 1)
        state, interval = add_sample(state, counter(value), index * S, range_uj)
        assert interval is not None
    assert state.total_j == pytest.approx(sum(steps) / 1e6)


# The meter


def meter(tree: FakeTree, clock: FakeClock, *wanted: str) -> PowerMeter:
    return PowerMeter(tree.sys, wanted, clock=clock, make_probe=InlineProbe)


def test_rail_gives_watts_at_once_and_joules_from_the_second_sample(tree: FakeTree, clock: FakeClock) -> None:
    jetson_orin_nano(tree)
    power = meter(tree, clock, "VDD_IN")
    first = power.read()
    assert (first.source, first.power_mw, first.interval_j) == ("VDD_IN", 7008, None)
    clock.advance(1)
    second = power.read()
    assert second.interval_j == pytest.approx(7.008)
    assert second.total_j == pytest.approx(7.008)
    assert second.known_s == 1.0


def test_counter_gives_the_mean_power_of_the_interval(tree: FakeTree, clock: FakeClock) -> None:
    n100(tree)
    power = meter(tree, clock)
    assert power.read().power_mw is None
    domain(tree, "intel-rapl:0", "package-0", 13_000_000)
    clock.advance(2)
    reading = power.read()
    assert reading.power_mw == 6000
    assert reading.interval_j == pytest.approx(12.0)


def test_counter_that_never_moves_is_frozen_and_its_zeros_are_no_joules(tree: FakeTree, clock: FakeClock) -> None:
    n100(tree)
    power = meter(tree, clock)
    states = []
    for _ in range(30):
        reading = power.read()
        states.append(reading.state)
        clock.advance(1)
    assert states.index(SensorState.FROZEN) == 10
    assert (reading.power_mw, reading.interval_j, reading.known_s) == (None, None, 9.0)
    domain(tree, "intel-rapl:0", "package-0", 7_000_000)
    reading = power.read()
    assert (reading.state, reading.power_mw) == (SensorState.OK, 6000)


def test_counter_for_root_only_is_no_permission_with_the_remedy_and_one_log_line(
    tree: FakeTree, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    n100(tree)

    def denied(name: str, read: Callable[[], PowerSample]) -> InlineProbe[PowerSample]:
        def look() -> PowerSample:
            raise PermissionError(13, "Permission denied", "energy_uj")

        return InlineProbe(name, look)

    power = PowerMeter(tree.sys, [], clock=clock, make_probe=denied)
    for _ in range(120):
        reading = power.read()
        clock.advance(1)
    assert (reading.state, reading.power_mw) == (SensorState.NO_PERMISSION, None)
    assert "udev" in reading.detail
    assert len(caplog.records) == 1


def test_board_without_a_rail_has_no_number_no_thread_and_no_log_line(
    tree: FakeTree, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    def never(name: str, read: Callable[[], PowerSample]) -> InlineProbe[PowerSample]:
        raise AssertionError(name)

    power = PowerMeter(tree.sys, ["VDD_IN"], clock=clock, make_probe=never)
    for _ in range(200):
        reading = power.read()
        clock.advance(1)
    assert reading.state is SensorState.MISSING
    assert reading == PowerReading("", SensorState.MISSING, reading.detail)
    assert caplog.records == []


def test_rail_that_goes_is_a_fault_and_is_found_again_under_another_index(tree: FakeTree, clock: FakeClock) -> None:
    chip(tree, 3, "ina226", power1_input=4_000_000, power1_label="VDD_IN")
    power = meter(tree, clock)
    assert power.read().power_mw == 4000
    (tree.sys / "class/hwmon/hwmon3").rename(tree.sys / "class/hwmon/hwmon5")
    clock.advance(1)
    assert power.read().state is SensorState.MISSING
    clock.advance(60)
    reading = power.read()
    assert (reading.state, reading.power_mw, reading.interval_j) == (SensorState.OK, 4000, None)


def test_driver_that_hangs_is_bridged_for_two_seconds_and_then_blocked(tree: FakeTree, clock: FakeClock) -> None:
    class Silent(InlineProbe[PowerSample]):
        def poll(self, now_ns: int) -> PowerSample | OSError | Waiting:
            return Waiting(S)

    jetson_orin_nano(tree)
    power = PowerMeter(tree.sys, ["VDD_IN"], clock=clock, make_probe=Silent)
    assert power.read().state is SensorState.MISSING  # no answer yet
    clock.advance(2)
    reading = power.read()
    assert (reading.state, reading.power_mw, reading.source) == (SensorState.BLOCKED, None, "VDD_IN")
