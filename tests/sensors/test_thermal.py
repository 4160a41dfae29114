from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edgeinfer.sensors.probe import InlineProbe, Waiting
from edgeinfer.sensors.state import SensorState
from edgeinfer.sensors.thermal import ThermalReader, ThermalReading, ZoneSample
from edgeinfer.sensors.trips import KernelTrip, read_trips
from tests.sensors.tree import FakeClock, FakeTree


def make(tree: FakeTree, clock: FakeClock, *types: str) -> ThermalReader:
    return ThermalReader(tree.sys, types or ("cpu-thermal",), clock=clock, make_probe=InlineProbe)


def read(reader: ThermalReader, clock: FakeClock, times: int = 2, period_s: float = 1.0) -> ThermalReading:
    reading = reader.read()
    for _ in range(times - 1):
        clock.advance(period_s)
        reading = reader.read()
    clock.advance(period_s)
    return reading


@pytest.mark.parametrize("kind", ["cpu-thermal", "cpu_thermal", "CPU-Thermal"])
@pytest.mark.parametrize("wanted", ["cpu-thermal", "cpu_thermal"])
def test_both_spellings_are_one_name(tree: FakeTree, clock: FakeClock, kind: str, wanted: str) -> None:
    tree.zone(0, "gpu-thermal", 90000)
    tree.zone(1, kind, 51000)
    reading = read(make(tree, clock, wanted), clock)
    assert (reading.temp_mc, reading.zone, reading.state) == (51000, kind, SensorState.OK)
    assert reading.unused == ("gpu-thermal",)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_zone_is_found_by_type_whatever_its_index(tree: FakeTree, clock: FakeClock, order: tuple[int, ...]) -> None:
    for index, (kind, temp) in zip(
        order, [("acpitz", 27800), ("x86_pkg_temp", 61000), ("iwlwifi_1", 95000)], strict=True
    ):
        tree.zone(index, kind, temp)
    assert read(make(tree, clock, "x86_pkg_temp", "TCPU"), clock).temp_mc == 61000


def test_the_hottest_of_all_listed_zones_counts_whichever_is_preferred(tree: FakeTree, clock: FakeClock) -> None:
    tree.zone(0, "soc-thermal", 90000)
    tree.zone(1, "cpu-thermal", 50000)
    tree.zone(2, "cpu-thermal", 57000)
    tree.zone(3, "gpu-thermal", 99000)
    for wanted in (("cpu-thermal", "soc-thermal"), ("soc-thermal", "cpu-thermal")):
        reading = read(make(tree, clock, *wanted), clock)
        assert (reading.temp_mc, reading.zone) == (90000, "soc-thermal")
    assert read(make(tree, clock, "cpu-thermal"), clock).temp_mc == 57000


def test_next_type_takes_over_when_the_first_fails(tree: FakeTree, clock: FakeClock) -> None:
    first = tree.zone(0, "cpu-thermal", 50000)
    tree.zone(1, "soc-thermal", 45000)
    reader = make(tree, clock, "cpu-thermal", "soc-thermal")
    assert read(reader, clock).zone == "cpu-thermal"
    (first / "temp").write_text("-273150\n")
    assert read(reader, clock, times=1).temp_mc == 50000
    assert read(reader, clock).zone == "soc-thermal"


def test_no_zone_names_what_was_wanted_and_what_is_there(tree: FakeTree, clock: FakeClock) -> None:
    tree.zone(0, "acpitz", 27800)
    reading = read(make(tree, clock, "cpu-thermal"), clock)
    assert reading.state is SensorState.MISSING
    assert reading.temp_mc is None
    assert "cpu-thermal" in reading.detail
    assert "acpitz" in reading.detail


def test_missing_class_folder_is_missing(tree: FakeTree, clock: FakeClock) -> None:
    reading = read(make(tree, clock), clock)
    assert reading.state is SensorState.MISSING
    assert "none at all" in reading.detail


def test_zone_that_goes_is_missing_and_is_found_again_under_another_index(tree: FakeTree, clock: FakeClock) -> None:
    folder = tree.zone(0, "cpu-thermal", 51000)
    reader = make(tree, clock)
    assert read(reader, clock).state is SensorState.OK
    shutil.rmtree(folder)
    assert read(reader, clock, times=1).state is SensorState.UNCONFIRMED
    assert read(reader, clock, times=1).state is SensorState.MISSING
    tree.zone(0, "gpu-thermal", 99000)
    tree.zone(3, "cpu-thermal", 52000)
    reading = read(reader, clock, times=5)
    assert (reading.temp_mc, reading.zones[0].name) == (52000, "thermal_zone3")


def test_zone_whose_index_becomes_another_sensor_is_never_read_as_the_old_one(tree: FakeTree, clock: FakeClock) -> None:
    folder = tree.zone(0, "cpu-thermal", 51000)
    reader = make(tree, clock)
    read(reader, clock)
    (folder / "type").write_text("gpu-thermal\n")
    (folder / "temp").write_text("59000\n")
    reading = read(reader, clock, times=3)
    assert reading.state is SensorState.MISSING
    assert reading.temp_mc is None


def test_frozen_zone_is_a_fault_until_it_moves(tree: FakeTree, clock: FakeClock) -> None:
    folder = tree.zone(0, "cpu-thermal", 51000)
    reader = make(tree, clock)
    for second in range(240):
        reading = reader.read(busy_share=0.0 if second < 30 else 0.95)
        clock.advance(1)
    assert reading.state is SensorState.FROZEN
    assert reading.temp_mc is None
    assert "51000" in reading.detail
    (folder / "temp").write_text("51487\n")
    assert read(reader, clock, times=1).temp_mc == 51487


def test_unreadable_zone_says_no_permission(tree: FakeTree, clock: FakeClock) -> None:
    tree.zone(0, "cpu-thermal", 51000)

    def denied(name: str, read: Callable[[], ZoneSample]) -> InlineProbe[ZoneSample]:
        def look() -> ZoneSample:
            raise PermissionError(13, "Permission denied", "temp")

        return InlineProbe(name, look)

    reader = ThermalReader(tree.sys, ["cpu-thermal"], clock=clock, make_probe=denied)
    assert read(reader, clock).state is SensorState.NO_PERMISSION


@pytest.mark.parametrize("number", [19, 5, 11, 22])  # ENODEV, EIO, EAGAIN, EINVAL: drivers answer with all of them
def test_driver_error_is_missing_with_its_text(tree: FakeTree, clock: FakeClock, number: int) -> None:
    tree.zone(0, "cpu-thermal", 51000)

    def failing(name: str, read: Callable[[], ZoneSample]) -> InlineProbe[ZoneSample]:
        def look() -> ZoneSample:
            raise OSError(number, os.strerror(number), "temp")

        return InlineProbe(name, look)

    reading = read(ThermalReader(tree.sys, ["cpu-thermal"], clock=clock, make_probe=failing), clock)
    assert reading.state is SensorState.MISSING
    assert os.strerror(number) in reading.detail


class SilentProbe:
    """A driver that hangs from its third answer on."""

    def __init__(self, name: str, read: Callable[[], ZoneSample]) -> None:
        self._read, self._left, self._since_ns = read, 2, 0

    def poll(self, now_ns: int) -> ZoneSample | OSError | Waiting:
        if self._left:
            self._left -= 1
            return self._read()
        self._since_ns = self._since_ns or now_ns
        return Waiting(self._since_ns)

    def close(self) -> None: ...

    @property
    def hanging(self) -> bool:
        return True


def test_hanging_driver_is_bridged_for_two_seconds_and_then_blocked(tree: FakeTree, clock: FakeClock) -> None:
    tree.zone(0, "cpu-thermal", 51000)
    reader = ThermalReader(tree.sys, ["cpu-thermal"], clock=clock, make_probe=SilentProbe)
    assert read(reader, clock).state is SensorState.OK
    assert read(reader, clock, times=2).temp_mc == 51000
    reading = read(reader, clock)
    assert reading.state is SensorState.BLOCKED
    assert reading.temp_mc is None


def test_zone_that_comes_and_goes_with_a_hanging_driver_never_costs_more_than_sixteen_threads(
    tree: FakeTree, clock: FakeClock
) -> None:
    made = 0

    def hanging(name: str, read: Callable[[], ZoneSample]) -> SilentProbe:
        nonlocal made
        made += 1
        return SilentProbe(name, read)

    reader = ThermalReader(tree.sys, ["cpu-thermal"], clock=clock, make_probe=hanging)
    for index in range(100):
        folder = tree.zone(index % 2, "cpu-thermal", 51000)
        read(reader, clock, times=31)
        shutil.rmtree(folder)
    assert made == 16
    assert read(reader, clock).state is SensorState.MISSING


def test_trip_points_come_from_sysfs_without_placeholders(tree: FakeTree, clock: FakeClock) -> None:
    folder = tree.zone(
        0, "cpu-thermal", 51000,
        [("passive", -274000), ("active", 50000), ("critical", 110000), ("hot", 0), ("passive", 85000)],
    )  # fmt: skip
    expected = (
        KernelTrip("active", 50000, 2000), KernelTrip("passive", 85000, 2000), KernelTrip("critical", 110000, 2000),
    )  # fmt: skip
    assert read_trips(folder) == expected
    assert read(make(tree, clock), clock).zones[0].trips == expected


@pytest.mark.slow
def test_hour_of_a_failing_and_flapping_sensor_is_few_lines(
    tree: FakeTree, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tree.zone(0, "cpu-thermal", 51000)
    reader = make(tree, clock)
    caplog.set_level(logging.DEBUG, logger="edgeinfer.sensors")
    for second in range(3600):
        (folder / "temp").write_text("51000\n" if second % 8 < 4 else "garbage\n")
        reader.read()
        clock.advance(1)
    assert 2 <= len(caplog.records) < 130


def test_one_change_is_one_line(tree: FakeTree, clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    folder = tree.zone(0, "cpu-thermal", 51000)
    reader = make(tree, clock)
    caplog.set_level(logging.INFO, logger="edgeinfer.sensors")
    read(reader, clock, times=100)
    assert len(caplog.records) == 1
    caplog.clear()
    (folder / "temp").write_text("-273150\n")
    read(reader, clock, times=100)
    assert len(caplog.records) == 1
    assert "state=absurd was=ok" in caplog.text


def test_type_that_is_a_fifo_does_not_block_the_scan(tree: FakeTree, clock: FakeClock) -> None:
    tree.zone(0, "cpu-thermal", 51000)
    hostile = tree.sys / "class" / "thermal" / "thermal_zone1"
    hostile.mkdir()
    os.mkfifo(hostile / "type")
    assert read(make(tree, clock), clock).temp_mc == 51000


def test_real_tree_of_this_machine_is_read_without_error(clock: FakeClock) -> None:
    reader = ThermalReader(Path("/sys"), ["x86_pkg_temp", "cpu-thermal"], clock=clock)
    reader.read()
    reader.close()
