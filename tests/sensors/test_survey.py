"""Each board's own tree, with the board file that `auto` finds for it: what is found, what is used and why."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from edgeinfer.artifact.board import find_board, load_board
from edgeinfer.clock import MonotonicClock
from edgeinfer.sensors.findings import Finding
from edgeinfer.sensors.firmware import Slowdown
from edgeinfer.sensors.state import SensorState
from edgeinfer.sensors.survey import Survey, survey
from tests.sensors.boards import BOARDS, PI_FIRMWARE, chip, raspberry_pi_4
from tests.sensors.tree import FakeTree


def look(tree: FakeTree, name: str) -> Survey:
    machine = "x86_64" if name == "n100-8gb" else "aarch64"
    board = load_board(find_board(proc_root=tree.proc, machine=machine))
    assert board.name == name
    return survey(board, tree.sys, tree.proc, clock=MonotonicClock(), sleep=lambda _: time.sleep(0.005))


def row(found: Survey, where: str) -> Finding:
    (item,) = (item for item in found.findings if item.where == where)
    return item


EXPECTED = {
    # zone, millidegrees, verdict, its source, top clock in MHz, clusters, power rail, milliwatts
    "raspberry-pi-4-2gb": ("cpu-thermal", 61341, Slowdown.NONE, "get_throttled", 1500, 1, "", None),
    "raspberry-pi-5-8gb": ("cpu-thermal", 57300, Slowdown.NONE, "get_throttled", 2400, 1, "", None),
    "jetson-orin-nano": ("tj-thermal", 52343, Slowdown.NONE, "thermal-cpufreq-0", 1510, 2, "VDD_IN", 7008),
    "rock-5b": ("bigcore2-thermal", 60000, Slowdown.NONE, "thermal-cpufreq-0", 2400, 3, "", None),
    "imx8m-plus": ("soc-thermal", 48000, Slowdown.NONE, "cpufreq-cpu0", 1600, 1, "", None),
    "n100-8gb": ("x86_pkg_temp", 56000, Slowdown.NONE, "package_throttle_count", 3400, 4, "package-0", 0),
}


@pytest.mark.parametrize("name", BOARDS)
def test_each_board_is_read_as_it_is(tree: FakeTree, name: str) -> None:
    BOARDS[name](tree)
    found = look(tree, name)
    reading = found.reading
    zone, temp_mc, slowdown, source, mhz, clusters, rail, milliwatts = EXPECTED[name]
    assert (reading.thermal.zone, reading.thermal.temp_mc) == (zone, temp_mc)
    assert (reading.firmware.slowdown, reading.firmware.source) == (slowdown, source)
    assert (reading.clock.max_hz or 0) // 1_000_000 == mhz
    assert len(reading.policies) == clusters
    assert (reading.power.source, reading.power.power_mw) == (rail, milliwatts)
    assert found.remarks == ()
    assert sum(item.used and item.number == temp_mc and "that counts" in item.why for item in found.findings) == 1


@pytest.mark.parametrize(
    ("name", "where", "state", "why"),
    [
        ("n100-8gb", "thermal_zone0", SensorState.OK, "placeholder"),
        ("n100-8gb", "thermal_zone1", SensorState.OK, "no sensor: always 20 C"),
        ("n100-8gb", "thermal_zone3", SensorState.OK, "Wi-Fi"),
        ("n100-8gb", "hwmon1/temp1", SensorState.OK, "not in thermal.zones of n100-8gb"),
        ("n100-8gb", "hwmon2/temp1", SensorState.OK, "only while no zone can be believed"),
        ("n100-8gb", "intel-rapl:0:0", SensorState.OK, "not the whole board"),
        ("jetson-orin-nano", "thermal_zone2", SensorState.ABSURD, "no power"),
        ("rock-5b", "thermal_zone5", SensorState.OK, "the GPU's sensor"),
    ],
)
def test_what_is_not_used_says_why(tree: FakeTree, name: str, where: str, state: SensorState, why: str) -> None:
    BOARDS[name](tree)
    item = row(look(tree, name), where)
    assert not item.used
    assert item.state is state
    assert why in item.why


def test_limits_of_a_driver_are_told_without_its_placeholders(tree: FakeTree) -> None:
    BOARDS["n100-8gb"](tree)
    item = row(look(tree, "n100-8gb"), "hwmon1/temp1")
    assert [(trip.kind, trip.temp_mc) for trip in item.trips] == [("crit", 84850)]


def test_sub_rails_and_second_counters_are_shown_but_not_used(tree: FakeTree) -> None:
    BOARDS["jetson-orin-nano"](tree)
    powers = [item for item in look(tree, "jetson-orin-nano").findings if item.kind == "power"]
    assert [(item.name, item.number, item.used) for item in powers] == [
        ("VDD_IN", 7008, True), ("VDD_CPU_GPU_CV", 2106, False), ("VDD_SOC", 1658, False),
    ]  # fmt: skip


def test_flags_of_now_and_before_are_told_in_words(tree: FakeTree) -> None:
    raspberry_pi_4(tree)
    (tree.sys / PI_FIRMWARE).write_text("50005\n")
    found = look(tree, "raspberry-pi-4-2gb")
    (item,) = (item for item in found.findings if item.kind == "firmware")
    assert item.value == "slowed down (power)"
    assert "now under-voltage, throttled; since cleared under-voltage, throttled" in item.why


def test_trip_of_the_kernel_below_the_board_files_is_remarked(tree: FakeTree) -> None:
    BOARDS["rock-5b"](tree)
    tree.zone(1, "bigcore0-thermal", 59000, [("passive", 75000), ("passive", 85000)])  # as Radxa's own kernel has it
    (remark,) = look(tree, "rock-5b").remarks
    assert "passive trip is at 75.0 C" in remark
    assert "85.0 C" in remark


def test_active_trips_of_a_fan_are_no_throttling(tree: FakeTree) -> None:
    BOARDS["raspberry-pi-5-8gb"](tree)
    assert look(tree, "raspberry-pi-5-8gb").remarks == ()


@pytest.mark.slow
def test_sensor_that_hangs_is_one_line_and_holds_nothing_up(tree: FakeTree) -> None:
    raspberry_pi_4(tree)
    chip(tree, 2, "hangs")
    hanging = tree.sys / "class/hwmon/hwmon2/temp1_input"
    os.mkfifo(hanging)
    started = time.monotonic()
    found = look(tree, "raspberry-pi-4-2gb")
    assert time.monotonic() - started < 5
    assert row(found, "hwmon2/temp1").state is SensorState.BLOCKED
    assert found.reading.thermal.temp_mc == 61341
    hanging.open("w").close()  # let its thread end


def test_this_machine_is_surveyed_without_an_error() -> None:
    board = load_board(find_board(machine=os.uname().machine))
    found = survey(board, Path("/sys"), Path("/proc"), clock=MonotonicClock(), sleep=lambda _: time.sleep(0.005))
    assert {item.kind for item in found.findings} >= {"firmware", "clock", "power", "cpu"}
    assert found.board == board.name
