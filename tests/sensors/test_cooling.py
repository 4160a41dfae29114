from __future__ import annotations

import pytest

from edgeinfer.sensors.cooling import Cooler, cooler_kind, read_cooling
from tests.sensors.tree import FakeTree


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("cpufreq-cpu0", Cooler.CPU), ("thermal-cpufreq-1", Cooler.CPU), ("thermal-idle-0", Cooler.CPU),
        ("Processor", Cooler.CPU), ("intel_powerclamp", Cooler.CPU), ("pwm-fan", Cooler.FAN), ("Fan", Cooler.FAN),
        ("gpio-fan", Cooler.FAN), ("thermal-devfreq-0", Cooler.CLOCK), ("devfreq-fb000000.gpu", Cooler.CLOCK),
        ("iwlwifi_1", Cooler.OTHER), ("LCD", Cooler.OTHER), ("TCC Offset", Cooler.OTHER),
    ],
)  # fmt: skip
def test_kind_follows_from_the_drivers_name(kind: str, expected: Cooler) -> None:
    assert cooler_kind(kind) is expected


def test_devices_by_index_with_what_they_do_now(tree: FakeTree) -> None:
    tree.cooler(10, "pwm-fan", 2)
    tree.cooler(2, "thermal-cpufreq-0", 3)
    tree.write(tree.sys / "class/thermal/cooling_device2/max_state", "11\n")
    devices = read_cooling(tree.sys)
    assert [(item.name, item.state, item.max_state) for item in devices] == [
        ("cooling_device2", 3, 11), ("cooling_device10", 2, None),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "garbage"])
def test_device_that_errs_is_left_out_and_the_others_tell(tree: FakeTree, text: str) -> None:
    tree.cooler(0, "Processor", 1)
    tree.cooler(1, "Processor", 2)
    tree.write(tree.sys / "class/thermal/cooling_device0/cur_state", text)
    assert [item.name for item in read_cooling(tree.sys)] == ["cooling_device1"]


def test_powerclamp_that_is_off_says_minus_one(tree: FakeTree) -> None:
    tree.cooler(0, "intel_powerclamp", -1)
    assert read_cooling(tree.sys)[0].state == 0
