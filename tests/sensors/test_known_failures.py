"""Boards that misled other people's software: section D of the list of known failures, one class of tests for each."""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer.artifact.board import known_boards, load_board
from edgeinfer.clock import MonotonicClock
from edgeinfer.governor.policy import Decision, Policy, PolicyState, step
from edgeinfer.limits import ThermalLevel
from edgeinfer.sensors.cpu import clock_share, thread_budget, usable_cpus
from edgeinfer.sensors.firmware import FirmwareReader, Slowdown, judge_flags, parse_throttled
from edgeinfer.sensors.hwmon import find_temperatures, read_thresholds
from edgeinfer.sensors.probe import InlineProbe
from edgeinfer.sensors.sampling import BoardReading, BoardSensors
from edgeinfer.sensors.state import SensorState
from edgeinfer.sensors.thermal import ThermalReader, ThermalReading, ZoneSample
from edgeinfer.sensors.trips import KernelTrip, read_trips
from edgeinfer.sensors.vcgencmd import Vcgencmd
from tests.sensors.boards import PI_FIRMWARE, chip, n100, raspberry_pi_4, rk3588
from tests.sensors.test_vcgencmd import stub
from tests.sensors.tree import FakeClock, FakeTree

PI_4 = load_board(known_boards()["raspberry-pi-4-2gb"])
S = 1_000_000_000


def decide(readings: list[ThermalReading]) -> list[Decision]:
    policy, state, found = Policy.of(PI_4.thermal), PolicyState(), []
    for second, reading in enumerate(readings):
        state, decision = step(policy, state, reading, second * S)
        found.append(decision)
    return found


def settled(sensors: BoardSensors) -> BoardReading:
    for _ in range(6):
        reading = sensors.read()
        time.sleep(0.005)
    return reading


FAILING = {
    "missing": "",
    "no mailbox": "echo 'VCHI initialization failed'; exit 255",
    "forbidden": 'echo "Can\'t open device file: /dev/vcio"; exit 1',
    "hangs": "exec sleep 60",
    "garbage": "echo 'error=1 error_msg=\"Command not registered\"'",
}


class TestD1ThrottleFlagsMisread:
    @pytest.mark.parametrize(
        ("text", "now", "since", "verdict"),
        [
            ("0x0", set(), set(), Slowdown.NONE),
            ("0x50000", set(), {"voltage", "throttled"}, Slowdown.NONE),
            ("0x50005", {"voltage", "throttled"}, {"voltage", "throttled"}, Slowdown.POWER),
            ("0x2", {"capped"}, set(), Slowdown.THERMAL),
            ("0x4", {"throttled"}, set(), Slowdown.THERMAL),
            ("0x80008", {"soft"}, {"soft"}, Slowdown.THERMAL),
            ("throttled=0xe0000\n", set(), {"capped", "throttled", "soft"}, Slowdown.NONE),
        ],
    )
    def test_bits_of_now_and_of_before_are_told_apart(
        self, text: str, now: set[str], since: set[str], verdict: Slowdown
    ) -> None:
        flags = parse_throttled(text)
        assert flags is not None
        found = {
            "voltage": (flags.under_voltage, flags.under_voltage_seen),
            "capped": (flags.frequency_capped, flags.frequency_capped_seen),
            "throttled": (flags.throttled, flags.throttled_seen),
            "soft": (flags.soft_limit, flags.soft_limit_seen),
        }
        assert {name for name, (is_now, _) in found.items() if is_now} == now
        assert {name for name, (_, seen) in found.items() if seen} == since
        assert judge_flags(flags).slowdown is verdict

    def test_garbage_is_unknown_and_a_fault(self, tree: FakeTree, clock: FakeClock) -> None:
        raspberry_pi_4(tree)
        (tree.sys / PI_FIRMWARE).write_text("garbage\n")
        reading = FirmwareReader(tree.sys, tree.proc, clock=clock).read()
        assert (reading.slowdown, reading.state) == (Slowdown.UNKNOWN, SensorState.ABSURD)


class TestD2VcgencmdAbsentOrForbidden:
    def reader(self, tree: FakeTree, clock: FakeClock, tmp_path: Path, body: str) -> FirmwareReader:
        raspberry_pi_4(tree)
        (tree.sys / PI_FIRMWARE).unlink()
        path = stub(tmp_path, body) if body else str(tmp_path / "nosuch")
        return FirmwareReader(tree.sys, tree.proc, clock=clock, vcgencmd=Vcgencmd([path], timeout_s=0.1))

    def test_program_is_asked_where_sysfs_has_no_flags(self, tree: FakeTree, clock: FakeClock, tmp_path: Path) -> None:
        reading = self.reader(tree, clock, tmp_path, "echo throttled=0x50005").read()
        assert (reading.slowdown, reading.source) == (Slowdown.POWER, "vcgencmd")

    @pytest.mark.parametrize("body", FAILING.values(), ids=FAILING)
    def test_failure_is_unknown_and_a_fault_and_never_fine(
        self, tree: FakeTree, clock: FakeClock, tmp_path: Path, body: str
    ) -> None:
        reading = self.reader(tree, clock, tmp_path, body).read()
        assert reading.slowdown is Slowdown.UNKNOWN
        assert reading.state.fault
        assert reading.detail

    @pytest.mark.parametrize("body", FAILING.values(), ids=FAILING)
    def test_other_sources_tell_meanwhile(self, tree: FakeTree, clock: FakeClock, tmp_path: Path, body: str) -> None:
        reader = self.reader(tree, clock, tmp_path, body)
        chip(tree, 1, "rpi_volt", in0_lcrit_alarm=1)
        reading = reader.read()
        assert (reading.slowdown, reading.source) == (Slowdown.POWER, "rpi_volt")
        assert reading.state.fault  # and still it is said that the flags are not there

    def test_failing_program_is_not_started_every_second(
        self, tree: FakeTree, clock: FakeClock, tmp_path: Path
    ) -> None:
        calls = tmp_path / "calls"
        reader = self.reader(tree, clock, tmp_path, f"echo x >> {calls}; exit 255")
        for _ in range(250):
            reader.read()
            clock.advance(1)
        assert calls.read_text().count("x") == 1

    def test_hour_without_it_is_one_log_line(
        self, tree: FakeTree, clock: FakeClock, tmp_path: Path, caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        raspberry_pi_4(tree)
        (tree.sys / PI_FIRMWARE).unlink()
        monkeypatch.setenv("PATH", str(tmp_path))  # nothing there
        caplog.set_level(logging.INFO, logger="edgeinfer.sensors")
        sensors = BoardSensors(tree.sys, tree.proc, ["cpu-thermal"], clock=clock)
        for _ in range(60):
            sensors.read()
            clock.advance(60)
        sensors.close()
        lines = [record.getMessage() for record in caplog.records if "name=firmware" in record.getMessage()]
        assert len(lines) == 1
        assert "not installed" in lines[0]


class TestD3OneBogusReading:
    def test_known_sequence_of_a_raspberry_pi_throttles_nothing(self, tree: FakeTree, clock: FakeClock) -> None:
        raspberry_pi_4(tree)
        reader = ThermalReader(tree.sys, ["cpu-thermal"], clock=clock, make_probe=InlineProbe)
        readings = []
        for text in ("51000", "51000", "51000", "85000", "51000", "-650788984", "51000"):
            (tree.sys / "class/thermal/thermal_zone0/temp").write_text(f"{text}\n")
            readings.append(reader.read())
            clock.advance(1)
        assert {decision.duty_cycle for decision in decide(readings)} == {1.0}
        assert {reading.temp_mc for reading in readings[1:]} == {51000}


class TestD4NoTemperatureAtAll:
    def broken(self, error: OSError) -> Callable[[str, Callable[[], ZoneSample]], InlineProbe[ZoneSample]]:
        def make(name: str, read: Callable[[], ZoneSample]) -> InlineProbe[ZoneSample]:
            def look() -> ZoneSample:
                raise error

            return InlineProbe(name, look)

        return make

    @pytest.mark.parametrize("number", [19, 5, 13])
    def test_driver_that_raises_is_no_temperature_and_the_conservative_pace(
        self, tree: FakeTree, clock: FakeClock, number: int
    ) -> None:
        raspberry_pi_4(tree)
        error = OSError(number, os.strerror(number), "temp")
        reader = ThermalReader(tree.sys, ["cpu-thermal"], clock=clock, make_probe=self.broken(error))
        readings = [reader.read(), reader.read()]
        assert (readings[1].temp_mc, readings[1].state.fault) == (None, True)
        assert decide(readings)[1].duty_cycle == PI_4.thermal.fault_duty_cycle

    @pytest.mark.parametrize("text", ["None", "", "nan", "  "])
    def test_value_that_is_none_is_no_number(self, tree: FakeTree, clock: FakeClock, text: str) -> None:
        tree.zone(0, "cpu-thermal", text)
        reader = ThermalReader(tree.sys, ["cpu-thermal"], clock=clock, make_probe=InlineProbe)
        readings = [reader.read(), reader.read()]
        assert (readings[1].temp_mc, readings[1].state) == (None, SensorState.ABSURD)

    def test_board_without_any_class_folder_is_sampled_all_the_same(self, tree: FakeTree) -> None:
        tree.cpus("0-3", "0-3")
        sensors = BoardSensors(tree.sys, tree.proc, ["cpu-thermal", "hwmon:x"], clock=MonotonicClock())
        reading = settled(sensors)
        sensors.close()
        assert (reading.thermal.state, reading.thermal.temp_mc) == (SensorState.MISSING, None)
        assert decide([reading.thermal])[0].duty_cycle == PI_4.thermal.fault_duty_cycle


class TestD5PlaceholderThresholds:
    @pytest.mark.parametrize("text", ["0", "-273150", "-274000", "", "None", "65261850"])
    def test_trip_or_limit_that_is_none_is_ignored(self, tree: FakeTree, text: str) -> None:
        folder = tree.zone(0, "x86_pkg_temp", 50000)
        for index, value in enumerate((text, "105000")):
            tree.write(folder / f"trip_point_{index}_type", "critical\n")
            tree.write(folder / f"trip_point_{index}_temp", f"{value}\n")
        assert read_trips(folder) == (KernelTrip("critical", 105000, 0),)
        chip(tree, 0, "nvme", temp1_input=38850, temp1_max=text, temp1_crit=text)
        assert read_thresholds(find_temperatures(tree.sys)[0]) == {}


class TestD6WrongZone:
    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
    @pytest.mark.parametrize("spelling", ["cpu-thermal", "cpu_thermal"])
    def test_zone_is_found_by_its_type_at_every_boot(
        self, tree: FakeTree, clock: FakeClock, order: tuple[int, ...], spelling: str
    ) -> None:
        for index, (kind, temp) in zip(order, [(spelling, 61000), ("gpu-thermal", 88000), ("ddr", 45000)], strict=True):
            tree.zone(index, kind, temp)
        reader = ThermalReader(tree.sys, PI_4.thermal.zones, clock=clock, make_probe=InlineProbe)
        reader.read()
        assert reader.read().temp_mc == 61000

    def test_operator_names_another_zone(self, tree: FakeTree, clock: FakeClock) -> None:
        rk3588(tree)
        chosen = replace(PI_4.thermal, zones=["gpu-thermal"])
        reader = ThermalReader(tree.sys, chosen.zones, clock=clock, make_probe=InlineProbe)
        reader.read()
        assert (reader.read().zone, reader.read().temp_mc) == ("gpu-thermal", 71000)

    def test_hottest_zone_of_the_box_is_not_the_cpu(self, tree: FakeTree, clock: FakeClock) -> None:
        n100(tree)
        tree.zone(3, "iwlwifi_1", 97000)
        board = load_board(known_boards()["n100-8gb"])
        reader = ThermalReader(tree.sys, board.thermal.zones, clock=clock, make_probe=InlineProbe)
        reader.read()
        assert reader.read().temp_mc == 56000


class TestD7FlappingAroundAThreshold:
    @pytest.mark.parametrize("centre_c", [72, 75, 78, 80])
    @pytest.mark.parametrize("period_s", [10, 60, 600])
    def test_hour_of_a_sine_of_one_degree_is_two_changes_at_most(self, centre_c: int, period_s: int) -> None:
        readings = [
            ThermalReading(
                round(centre_c * 1000 + 1000 * math.sin(2 * math.pi * second / period_s)), "cpu-thermal", SensorState.OK
            )
            for second in range(3600)
        ]
        levels = [ThermalLevel.NOMINAL, *(decision.level for decision in decide(readings))]
        first = levels.index(max(levels))
        assert sum(one is not other for one, other in itertools.pairwise(levels[first:])) <= 2


class TestD8OfflineCoresAndNoClock:
    def test_cores_that_go_offline_leave_with_the_next_sample_and_their_cluster_tells_no_clock(
        self, tree: FakeTree
    ) -> None:
        rk3588(tree)
        sensors = BoardSensors(tree.sys, tree.proc, ["package-thermal"], clock=MonotonicClock())
        before = settled(sensors)
        tree.cpus("0-7", "0-3")
        for policy in ("policy4", "policy6"):
            folder = tree.sys / "devices/system/cpu/cpufreq" / policy
            (folder / "affected_cpus").write_text("\n")
            (folder / "scaling_cur_freq").write_text("<unknown>\n")
        after = settled(sensors)
        sensors.close()
        assert (len(before.cpus), before.clock.max_hz) == (8, 2_400_000_000)
        assert (sorted(after.cpus), after.clock.max_hz) == ([0, 1, 2, 3], 1_800_000_000)
        assert thread_budget(after.cpus, None) == 4

    def test_no_cpufreq_is_an_unknown_clock_that_counts_as_the_full_one(self, tree: FakeTree) -> None:
        tree.cpus("0-1", "0-1")
        sensors = BoardSensors(tree.sys, tree.proc, ["x"], clock=MonotonicClock())
        reading = settled(sensors)
        sensors.close()
        assert (reading.clock.now_hz, reading.clock.max_hz, reading.policies) == (None, None, ())
        assert clock_share(reading.clock, working=True) == 1.0
        assert usable_cpus(tree.sys, tree.proc) == {0, 1}
