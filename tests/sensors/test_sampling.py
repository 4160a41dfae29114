from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from edgeinfer.clock import MonotonicClock
from edgeinfer.sensors.firmware import Slowdown
from edgeinfer.sensors.sampling import BoardReading, BoardSensors
from edgeinfer.sensors.state import SensorState
from tests.sensors.boards import chip
from tests.sensors.tree import FakeTree

WAITING = ["sensor[thermal_zone1]", "sensor[firmware]", "sensor[cpufreq]", "sensor[power]"]


def settle(sensors: BoardSensors, times: int = 8) -> BoardReading:
    reading = sensors.read()
    for _ in range(times):
        time.sleep(0.005)
        reading = sensors.read()
    return reading


@pytest.fixture
def board(tree: FakeTree) -> FakeTree:
    tree.zone(0, "acpitz", 27800)
    tree.zone(1, "cpu-thermal", 61000)
    tree.cpus("0-3", "0-3")
    tree.cooler(0, "cpufreq-cpu0", 0)
    tree.write(tree.proc / "stat", "cpu  1 0 1 1 1 0 0 0 0 0\n")
    tree.write(tree.sys / "devices/system/cpu/cpufreq/policy0/cpuinfo_max_freq", "1500000\n")
    return tree


def test_one_sample_tells_everything_the_governor_needs(board: FakeTree) -> None:
    sensors = BoardSensors(board.sys, board.proc, ["cpu-thermal"], clock=MonotonicClock())
    reading = settle(sensors)
    sensors.close()
    assert reading.thermal.temp_mc == 61000
    assert reading.firmware.slowdown is Slowdown.NONE
    assert reading.cpus == {0, 1, 2, 3}
    assert reading.clock.max_hz == 1_500_000_000


def test_power_of_the_rail_that_the_board_file_names_is_in_the_sample(board: FakeTree) -> None:
    chip(board, 0, "ina226", power1_input=4_000_000, power1_label="VDD_5V", power2_input=9_000_000)
    sensors = BoardSensors(board.sys, board.proc, ["cpu-thermal"], clock=MonotonicClock(), rails=["VDD_5V"])
    reading = settle(sensors)
    sensors.close()
    assert (reading.power.source, reading.power.power_mw) == ("VDD_5V", 4000)
    assert reading.power.total_j == pytest.approx(4 * reading.power.known_s)


def test_board_without_a_power_sensor_has_no_thread_for_it(board: FakeTree) -> None:
    sensors = BoardSensors(board.sys, board.proc, ["cpu-thermal"], clock=MonotonicClock())
    before = [thread.name for thread in threading.enumerate()].count("sensor[power]")
    settle(sensors)
    assert [thread.name for thread in threading.enumerate()].count("sensor[power]") == before
    sensors.close()


def test_cores_that_go_offline_are_gone_from_the_next_sample(board: FakeTree) -> None:
    sensors = BoardSensors(board.sys, board.proc, ["cpu-thermal"], clock=MonotonicClock())
    assert sensors.read().cpus == {0, 1, 2, 3}
    board.cpus("0-3", "0-1")
    assert sensors.read().cpus == {0, 1}
    sensors.close()


@pytest.mark.slow
def test_sensors_that_hang_cost_the_loop_milliseconds_and_become_blocked(board: FakeTree) -> None:
    hanging = [
        board.sys / "class/thermal/thermal_zone1/temp",
        board.sys / "class/thermal/cooling_device0/cur_state",
        board.sys / "devices/system/cpu/cpufreq/policy0/scaling_cur_freq",
        board.sys / "class/hwmon/hwmon0/power1_input",
    ]
    chip(board, 0, "ina226", power1_input=1_000_000, power1_label="VDD_IN")
    board.write(hanging[2], "1500000\n")
    for path in hanging:
        path.unlink()
        os.mkfifo(path)
    sensors = BoardSensors(board.sys, board.proc, ["cpu-thermal"], clock=MonotonicClock())
    slowest = 0.0
    end = time.monotonic() + 2.6
    while time.monotonic() < end:
        started = time.perf_counter()
        reading = sensors.read()
        slowest = max(slowest, time.perf_counter() - started)
        time.sleep(0.1)
    assert reading.thermal.state is SensorState.BLOCKED
    assert reading.firmware.slowdown is Slowdown.UNKNOWN
    assert (reading.clock.now_hz, reading.clock.max_hz, reading.policies) == (None, None, ())
    assert (reading.power.state, reading.power.power_mw) == (SensorState.BLOCKED, None)
    assert reading.cpus == {0, 1, 2, 3}
    names = sorted(thread.name for thread in threading.enumerate() if thread.name in WAITING)
    assert names == sorted(WAITING), "one thread for each sensor that hangs, and no more however long it lasts"
    assert slowest < 0.1
    for path in hanging:
        with path.open("w") as file:
            file.write("62000\n")
    sensors.close()


def test_this_machine_can_be_read() -> None:
    sensors = BoardSensors(Path("/sys"), Path("/proc"), ["x86_pkg_temp"], clock=MonotonicClock())
    sensors.read()
    reading = sensors.read()
    sensors.close()
    assert reading.cpus == os.sched_getaffinity(0)
