from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgeinfer.artifact.board import Thermal, Trip
from edgeinfer.clock import LoopClock
from edgeinfer.config import ThermalSection
from edgeinfer.governor.attribution import Cause
from edgeinfer.governor.frequency_cap import FrequencyCap
from edgeinfer.governor.governor import BLIND, Governor
from edgeinfer.limits import Limits, ThermalLevel
from edgeinfer.quantity import MilliCelsius, Nanoseconds
from edgeinfer.sensors.cpu import CpuClock
from edgeinfer.sensors.cpufreq import read_policies
from edgeinfer.sensors.firmware import UNKNOWN, FirmwareReading, Slowdown
from edgeinfer.sensors.probe import InlineProbe
from edgeinfer.sensors.sampling import BoardReading
from edgeinfer.sensors.state import SensorState
from edgeinfer.sensors.thermal import ThermalReading, ZoneReading
from edgeinfer.sensors.trips import KernelTrip
from tests.virtual_time import run_virtual

C = MilliCelsius
THERMAL = Thermal(
    zones=["cpu-thermal"],
    firmware_trip_c=C(100_000),
    trips=[
        Trip("warm", C(80_000), C(4_000), 0.7),
        Trip("hot", C(88_000), C(4_000), 0.35),
        Trip("critical", C(95_000), C(5_000), 0.0),
    ],
    dwell=Nanoseconds(5_000_000_000),
    fault_duty_cycle=0.5,
)
CPUS = frozenset({0, 1, 2, 3})
GIB = 1 << 30


def reading(
    temp_c: float | None, *, state: SensorState = SensorState.OK, firmware: FirmwareReading = UNKNOWN,
    cpus: frozenset[int] = CPUS, zones: tuple[ZoneReading, ...] = (),
) -> BoardReading:  # fmt: skip
    temp_mc = None if temp_c is None else round(temp_c * 1000)
    thermal = ThermalReading(temp_mc, "cpu-thermal" if temp_mc is not None else "", state, "", zones)
    return BoardReading(thermal, firmware, 0.5, cpus, CpuClock(1_500_000_000, 1_500_000_000, 1_500_000_000, "x"))


class Bench:
    """A governor over scripted readings; the last one stays."""

    def __init__(
        self, script: list[BoardReading], *, enabled: bool = True, ceiling: Callable[[], int] = lambda: GIB,
        thermal: Thermal = THERMAL, own_load: Callable[[], float | None] = lambda: None,
        cap: FrequencyCap | None = None, root: Path | None = None,
    ) -> None:  # fmt: skip
        self.script: Iterator[BoardReading] = iter(script)
        self.last = script[-1]
        self.reads = 0
        self.root = root
        self.published: list[Limits] = []
        self.governor = Governor(
            thermal=thermal, config=ThermalSection(enabled=enabled), read=self.read, cpus=CPUS,
            memory_ceiling=ceiling, clock=LoopClock(asyncio.get_running_loop()), publish=self.published.append,
            own_load=own_load, cap=cap,
        )  # fmt: skip

    def read(self) -> BoardReading:
        self.reads += 1
        self.last = next(self.script, self.last)
        if self.root is not None:
            return dataclasses.replace(self.last, policies=read_policies(self.root))
        return self.last

    async def run(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.governor.run()
        except TimeoutError:
            pass


def test_limits_are_published_when_something_to_obey_has_changed() -> None:
    async def main() -> None:
        bench = Bench([reading(50), reading(50.2), reading(50.4), reading(82), reading(82), reading(96)])
        await bench.run(8.5)
        assert [(item.level.name, item.duty_cycle) for item in bench.published] == [
            ("NOMINAL", 1.0), ("WARM", 0.61), ("CRITICAL", 0.0),
        ]  # fmt: skip
        assert "82.0 C >= 80.0 C" in bench.published[1].reason
        assert bench.published[0].cpus == CPUS
        assert bench.governor.limits.level is ThermalLevel.CRITICAL
        assert "96.0 C" in bench.governor.limits.reason

    run_virtual(main())


def test_history_counts_seconds_per_level_peak_changes_and_episodes() -> None:
    async def main() -> None:
        script = [reading(50)] * 10 + [reading(82)] * 20 + [reading(60)] * 10 + [reading(89)] * 5 + [reading(50)] * 15
        bench = Bench(script)
        await bench.run(60)
        found = bench.governor.snapshot()
        assert found.seconds_by_level == {
            ThermalLevel.NOMINAL: pytest.approx(35, abs=1), ThermalLevel.WARM: pytest.approx(20, abs=1),
            ThermalLevel.HOT: pytest.approx(5, abs=1), ThermalLevel.CRITICAL: 0,
        }  # fmt: skip
        assert sum(found.seconds_by_level.values()) == pytest.approx(60)
        assert (found.peak_mc, found.throttle_episodes, found.level_changes) == (89_000, 2, 4)

    run_virtual(main())


def test_steps_come_once_a_period_and_late_ones_are_not_made_up_for() -> None:
    async def main() -> None:
        bench = Bench([reading(50)])
        await bench.run(10.5)
        assert bench.reads == 11
        task = asyncio.create_task(bench.governor.run())
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        loop._jumping.now += 30  # type: ignore[attr-defined]  # the loop is held up for half a minute
        reads = bench.reads
        await asyncio.sleep(2.5)
        assert bench.reads - reads <= 4
        task.cancel()

    run_virtual(main())


def test_first_sample_is_confirmed_after_a_tenth_of_a_second() -> None:
    async def main() -> None:
        waiting = reading(None, state=SensorState.UNCONFIRMED)
        bench = Bench([waiting, reading(96)])
        await bench.run(0.15)
        assert [item.duty_cycle for item in bench.published] == [1.0, 0.0]

    run_virtual(main())


@pytest.mark.parametrize("then", [reading(96), reading(None, state=SensorState.MISSING)])
def test_work_can_wait_for_the_first_confirmed_temperature_or_fault(then: BoardReading) -> None:
    async def main() -> None:
        waiting = reading(None, state=SensorState.UNCONFIRMED)
        bench = Bench([waiting, waiting, then])
        running = asyncio.create_task(bench.governor.run())
        began = asyncio.get_running_loop().time()
        assert await bench.governor.until_known(timeout_ns=500_000_000)
        assert asyncio.get_running_loop().time() - began == pytest.approx(0.2, abs=0.01)
        assert bench.governor.limits.duty_cycle < 1
        assert await bench.governor.until_known(timeout_ns=0)
        running.cancel()

    run_virtual(main())


def test_work_does_not_wait_for_ever_for_a_temperature() -> None:
    async def main() -> None:
        bench = Bench([reading(None, state=SensorState.UNCONFIRMED)])
        running = asyncio.create_task(bench.governor.run())
        assert not await bench.governor.until_known(timeout_ns=500_000_000)
        running.cancel()

    run_virtual(main())


def test_disabled_governor_reports_and_holds_nothing_back() -> None:
    async def main() -> None:
        bench = Bench([reading(50), reading(96)], enabled=False)
        await bench.run(5)
        assert [(item.level, item.duty_cycle, item.throttled) for item in bench.published] == [
            (ThermalLevel.NOMINAL, 1.0, False)
        ]
        found = bench.governor.snapshot()
        assert (found.enabled, found.level, found.peak_mc, found.throttle_episodes) == (
            False, ThermalLevel.CRITICAL, 96_000, 0,
        )  # fmt: skip
        assert "thermal.enabled is false" in bench.governor.limits.reason
        assert "96.0 C" in bench.governor.limits.reason

    run_virtual(main())


def test_disabled_governor_ignores_a_sensor_fault_too() -> None:
    async def main() -> None:
        bench = Bench([reading(None, state=SensorState.MISSING)], enabled=False)
        await bench.run(5)
        assert bench.governor.limits.duty_cycle == 1.0

    run_virtual(main())


def test_sensor_fault_holds_back_to_the_boards_fault_duty_cycle() -> None:
    async def main() -> None:
        bench = Bench([reading(50), reading(None, state=SensorState.BLOCKED)])
        await bench.run(5)
        assert bench.published[-1].duty_cycle == 0.5
        assert "blocked" in bench.published[-1].reason
        assert bench.governor.snapshot().sensor_state is SensorState.BLOCKED

    run_virtual(main())


def test_offline_cores_leave_the_limits_and_come_back() -> None:
    async def main() -> None:
        bench = Bench([reading(50), reading(50, cpus=frozenset({0, 1})), reading(50), reading(50, cpus=frozenset({9}))])
        await bench.run(5)
        assert [item.cpus for item in bench.published] == [CPUS, {0, 1}, CPUS, {9}]

    run_virtual(main())


def test_new_memory_ceiling_is_published() -> None:
    async def main() -> None:
        ceilings = iter([GIB, GIB, GIB // 2])
        bench = Bench([reading(50)], ceiling=lambda: next(ceilings, GIB // 2))
        await bench.run(5)
        assert [item.memory_ceiling_bytes for item in bench.published] == [GIB, GIB // 2]

    run_virtual(main())


@pytest.mark.parametrize(
    ("firmware", "temp_c", "thermal_s", "power_s"),
    [
        (FirmwareReading(Slowdown.THERMAL, "cpufreq-cpu0"), 70, 10, 0),
        (FirmwareReading(Slowdown.POWER, "get_throttled"), 70, 0, 10),
        (FirmwareReading(Slowdown.NONE, "get_throttled"), 101, 0, 0),  # who can tell, is believed
        (UNKNOWN, 101, 10, 0),  # nobody tells: the temperature does
        (UNKNOWN, 99, 0, 0),
    ],
)
def test_seconds_of_firmware_throttling_are_counted_by_cause(
    firmware: FirmwareReading, temp_c: float, thermal_s: float, power_s: float
) -> None:
    async def main() -> None:
        bench = Bench([reading(temp_c, firmware=firmware)])
        await bench.run(10)
        found = bench.governor.snapshot()
        assert found.firmware_throttled_s == pytest.approx(thermal_s, abs=0.01)
        assert found.power_throttled_s == pytest.approx(power_s, abs=0.01)

    run_virtual(main())


def test_level_change_is_one_line_with_fields(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        await Bench([reading(50), reading(82)]).run(60)

    caplog.set_level(logging.INFO, logger="edgeinfer.governor")
    run_virtual(main())
    assert len(caplog.records) == 1
    assert "throttle level=WARM was=NOMINAL duty=0.61 enabled=True zone=cpu-thermal temp_mc=82000" in caplog.text


def test_kernel_that_acts_earlier_than_the_board_file_says_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    trips = (KernelTrip("active", 50_000, 0), KernelTrip("passive", 75_000, 0), KernelTrip("critical", 110_000, 0))
    zone = ZoneReading("thermal_zone0", "cpu-thermal", SensorState.OK, 50_000, 50_000, "", trips)

    async def main() -> None:
        await Bench([reading(50, zones=(zone,))]).run(60)

    run_virtual(main())
    assert len(caplog.records) == 1
    assert "kernel=passive at=75.0 C" in caplog.text


def test_seconds_of_throttling_have_a_cause() -> None:
    async def main() -> None:
        slowed = FirmwareReading(Slowdown.THERMAL, "cpufreq-cpu0")
        bench = Bench([reading(70, firmware=slowed)], own_load=lambda: 0.1)
        await bench.run(90)
        by = bench.governor.snapshot().throttled_by
        assert by[Cause.OTHERS] > 80  # 0.1 of 0.5 is ours
        assert sum(by.values()) == pytest.approx(bench.governor.snapshot().firmware_throttled_s)

    run_virtual(main())


def test_generic_board_takes_the_kernels_trip_and_a_known_one_does_not() -> None:
    zone = ZoneReading(
        "thermal_zone0", "cpu-thermal", SensorState.OK, 70_000, 70_000, "", (KernelTrip("passive", 75_000, 0),)
    )

    async def main(trips_from_kernel: bool) -> Limits:
        bench = Bench(
            [reading(70, zones=(zone,))], thermal=dataclasses.replace(THERMAL, trips_from_kernel=trips_from_kernel)
        )
        await bench.run(3)
        return bench.governor.limits

    assert run_virtual(main(False)).level is ThermalLevel.NOMINAL
    assert run_virtual(main(True)).level is ThermalLevel.CRITICAL


def test_clock_is_capped_before_work_is_paused_and_given_back(tmp_path: Path) -> None:
    folder = tmp_path / "devices/system/cpu/cpufreq/policy0"
    folder.mkdir(parents=True)
    for name, text in {
        "affected_cpus": "0 1 2 3", "cpuinfo_max_freq": "2000000", "scaling_max_freq": "2000000",
        "scaling_governor": "schedutil",
    }.items():  # fmt: skip
        (folder / name).write_text(text)

    async def main() -> None:
        bench = Bench([reading(50), reading(82)], cap=FrequencyCap(tmp_path, make_probe=InlineProbe), root=tmp_path)
        await bench.run(20)
        assert (folder / "scaling_max_freq").read_text() == "1400000"  # 0.61 of the time, at the full clock
        last = bench.governor.limits
        assert (last.max_freq_hz, last.duty_cycle) == (1_400_000_000, 0.87)
        assert [item.duty_cycle for item in bench.published][:2] == [1.0, 0.61]  # until the cap is seen in force
        bench.governor.close()
        assert (folder / "scaling_max_freq").read_text() == "2000000"

    run_virtual(main())


def test_model_is_learnt_and_told() -> None:
    async def main() -> None:
        temp_c, load, script = 40.0, 0.2, []
        for second in range(1500):
            script.append(dataclasses.replace(reading(temp_c + second % 3 / 10), busy_share=load))
            load = (0.2, 0.9, 0.5)[second // 100 % 3]
            temp_c += (32 + 40 * load - temp_c) / 60
        bench = Bench(script)
        assert bench.governor.snapshot().outlook == BLIND
        await bench.run(1499)
        found = bench.governor.snapshot().outlook
        assert found.trusted
        assert found.rise_c == pytest.approx(40, rel=0.2)
        assert found.tau_s == pytest.approx(60, rel=0.6)
        assert found.sustainable == 1.0
        assert found.next_trip_s is None

    run_virtual(main())


def test_before_the_first_step_everything_is_nominal() -> None:
    async def main() -> None:
        bench = Bench([reading(50)])
        assert bench.governor.limits.duty_cycle == 1.0
        assert dataclasses.asdict(bench.governor.snapshot())["temp_mc"] is None
        assert bench.published == []
        await asyncio.sleep(0)

    run_virtual(main())


@pytest.mark.parametrize(
    ("busy", "firmware", "share"),
    [
        (0.9, UNKNOWN, 0.5),
        (0.1, UNKNOWN, 1.0),
        (0.1, dataclasses.replace(UNKNOWN, slowdown=Slowdown.POWER), 0.5),
    ],
    ids=["busy", "idle: its clock says nothing", "held back"],
)
def test_limits_tell_the_clock_that_there_is_for_work(busy: float, firmware: FirmwareReading, share: float) -> None:
    clock = CpuClock(1_190_000_000, 2_400_000_000, 2_400_000_000, "schedutil")
    sample = dataclasses.replace(reading(40), busy_share=busy, clock=clock, firmware=firmware)

    async def main() -> None:
        board = Bench([sample])
        await board.run(3.5)
        assert [limits.clock_share for limits in board.published] == [share]

    run_virtual(main())
