from __future__ import annotations

import os

import pytest

from edgeinfer.sensors.hwmon import find_chips, find_temperatures, inputs, matches, read_thresholds
from edgeinfer.sensors.probe import InlineProbe
from edgeinfer.sensors.state import SensorState
from edgeinfer.sensors.thermal import ThermalReader, ThermalReading
from tests.sensors.boards import chip, n100
from tests.sensors.tree import FakeClock, FakeTree


def read(tree: FakeTree, clock: FakeClock, *wanted: str, times: int = 3) -> ThermalReading:
    reader = ThermalReader(tree.sys, wanted, clock=clock, make_probe=InlineProbe)
    for _ in range(times):
        reading = reader.read()
        clock.advance(3)
    return reading


def test_temperatures_by_chip_and_label(tree: FakeTree) -> None:
    n100(tree)
    assert [(item.name, item.type) for item in find_temperatures(tree.sys)] == [
        ("hwmon0/temp1", "hwmon:acpitz/temp1"), ("hwmon1/temp1", "hwmon:nvme/Composite"),
        ("hwmon2/temp1", "hwmon:coretemp/Package id 0"), ("hwmon2/temp2", "hwmon:coretemp/Core 0"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ("hwmon:coretemp", 2), ("hwmon:coretemp/Package id 0", 1), ("hwmon:coretemp/Tctl", 0), ("hwmon:core", 0),
        ("hwmon:acpitz/temp1", 1),
    ],
)  # fmt: skip
def test_name_means_a_chip_or_one_label_of_it(tree: FakeTree, wanted: str, count: int) -> None:
    n100(tree)
    assert sum(matches(wanted, item) for item in find_temperatures(tree.sys)) == count


def test_chip_is_found_whatever_its_index_and_spelling(tree: FakeTree, clock: FakeClock) -> None:
    chip(tree, 7, "cpu_thermal", temp1_input=61000)
    reading = read(tree, clock, "cpu-thermal", "hwmon:cpu-thermal")
    assert (reading.temp_mc, reading.zone, reading.zones[0].name) == (61000, "hwmon:cpu_thermal/temp1", "hwmon7/temp1")


def test_hwmon_tells_where_there_is_no_zone(tree: FakeTree, clock: FakeClock) -> None:
    chip(tree, 0, "k10temp", temp1_input=64125, temp1_label="Tctl")
    tree.zone(0, "acpitz", 27800)
    reading = read(tree, clock, "x86_pkg_temp", "hwmon:k10temp/Tctl")
    assert (reading.temp_mc, reading.state) == (64125, SensorState.OK)


def test_hwmon_is_not_asked_while_a_zone_tells(tree: FakeTree, clock: FakeClock) -> None:
    n100(tree)
    reading = read(tree, clock, "x86_pkg_temp", "hwmon:coretemp")
    assert [item.name for item in reading.zones] == ["thermal_zone4"]


def test_hwmon_takes_over_when_the_zone_fails_and_the_hotter_counts_when_it_is_back(
    tree: FakeTree, clock: FakeClock
) -> None:
    n100(tree)
    temp = tree.sys / "class/thermal/thermal_zone4/temp"
    temp.write_text("garbage\n")
    reader = ThermalReader(
        tree.sys, ["x86_pkg_temp", "hwmon:coretemp/Package id 0"], clock=clock, make_probe=InlineProbe
    )
    for _ in range(6):
        reading = reader.read()
        clock.advance(1)
    assert (reading.temp_mc, reading.zone) == (56000, "hwmon:coretemp/Package id 0")
    temp.write_text("57000\n")
    for _ in range(3):
        reading = reader.read()
        clock.advance(1)
    assert (reading.temp_mc, reading.zone) == (57000, "x86_pkg_temp")


def test_chip_that_becomes_another_is_never_read_as_the_old_one(tree: FakeTree, clock: FakeClock) -> None:
    chip(tree, 0, "k10temp", temp1_input=64125, temp1_label="Tctl")
    reader = ThermalReader(tree.sys, ["hwmon:k10temp/Tctl"], clock=clock, make_probe=InlineProbe)
    for _ in range(2):
        reader.read()
        clock.advance(1)
    chip(tree, 0, "nvme", temp1_input=31000)
    for _ in range(2):
        reading = reader.read()
        clock.advance(1)
    assert reading.temp_mc is None
    assert reading.state is SensorState.MISSING


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", {}), ("-273150", {}), ("None", {}), ("", {}), ("65261850", {}), ("95000", {"crit": 95000})],
)
def test_placeholders_are_no_thresholds(tree: FakeTree, text: str, expected: dict[str, int]) -> None:
    chip(tree, 0, "nvme", temp1_input=38850, temp1_crit=text, temp1_max="")
    (found,) = find_temperatures(tree.sys)
    assert read_thresholds(found) == expected


def test_tree_of_fifos_and_rubbish_does_not_block_the_search(tree: FakeTree) -> None:
    folder = tree.sys / "class/hwmon/hwmon0"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "name")
    chip(tree, 1, "x", temp1_input=1, temp1_label="ok", tempX_input=1, temp99999_label="y")
    os.mkfifo(tree.sys / "class/hwmon/hwmon1/temp2_input")
    os.mkfifo(tree.sys / "class/hwmon/hwmon1/temp2_label")
    tree.write(tree.sys / "class/hwmon/other/name", "z\n")
    assert [item.name for item in find_chips(tree.sys)] == ["x"]
    assert [item.label for item in find_temperatures(tree.sys)] == ["ok", "temp2"]


def test_average_is_taken_only_without_an_input(tree: FakeTree) -> None:
    chip(tree, 0, "amdgpu", power1_average=5_000_000, power2_input=1, power2_average=2)
    (found,) = find_chips(tree.sys)
    assert [path.name for _, path in inputs(found, "power")] == ["power1_average", "power2_input"]


def test_no_hwmon_class_is_no_chip(tree: FakeTree) -> None:
    assert find_chips(tree.sys) == []
