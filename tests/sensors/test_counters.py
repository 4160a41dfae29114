from __future__ import annotations

from edgeinfer.sensors.counters import GrowthMeter, power_counts, thermal_counts
from edgeinfer.sensors.firmware import FirmwareReader, Slowdown
from tests.sensors.boards import jetson_orin_nano, n100
from tests.sensors.tree import FakeClock, FakeTree


def test_only_growth_tells(tree: FakeTree) -> None:
    n100(tree)
    meter = GrowthMeter(thermal_counts(tree.sys))
    assert meter.grown() is None
    counter = tree.sys / "devices/system/cpu/cpu0/thermal_throttle/package_throttle_count"
    counter.write_text("9\n")
    assert meter.grown() == counter
    assert meter.grown() is None


def test_core_that_goes_and_comes_back_starts_anew(tree: FakeTree) -> None:
    n100(tree)
    meter = GrowthMeter(thermal_counts(tree.sys))
    meter.grown()
    counter = tree.sys / "devices/system/cpu/cpu2/thermal_throttle/core_throttle_count"
    counter.unlink()
    assert meter.grown() is None
    counter.write_text("99\n")
    assert meter.grown() is None
    counter.write_text("100\n")
    assert meter.grown() == counter


def test_intel_counters_are_thermal_throttling_for_the_sample_in_which_they_grow(
    tree: FakeTree, clock: FakeClock
) -> None:
    n100(tree)
    reader = FirmwareReader(tree.sys, tree.proc, clock=clock)
    assert reader.read().slowdown is Slowdown.NONE
    (tree.sys / "devices/system/cpu/cpu0/thermal_throttle/core_throttle_count").write_text("4\n")
    assert reader.read().slowdown is Slowdown.THERMAL
    assert reader.read().slowdown is Slowdown.NONE


def test_over_current_of_a_jetson_is_power_and_says_nothing_of_heat(tree: FakeTree, clock: FakeClock) -> None:
    jetson_orin_nano(tree)
    reader = FirmwareReader(tree.sys, tree.proc, clock=clock)
    assert reader.read().source == "thermal-cpufreq-0"
    (tree.sys / "class/hwmon/hwmon1/oc3_event_cnt").write_text("5\n")
    reading = reader.read()
    assert (reading.slowdown, reading.source) == (Slowdown.POWER, "oc3_event_cnt")
    for index in range(3):
        tree.cooler(index, "pwm-fan", 0)
    assert reader.read().slowdown is Slowdown.UNKNOWN
    assert power_counts(tree.sys)
