from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterator

import pytest

from edgeinfer.artifact.board import Thermal, Trip
from edgeinfer.clock import LoopClock
from edgeinfer.config import ThermalSection
from edgeinfer.governor.governor import Governor
from edgeinfer.limits import Limits, ThermalLevel
from edgeinfer.quantity import MilliCelsius, Nanoseconds
from edgeinfer.sensors.cpu import CpuClock
from edgeinfer.sensors.firmware import UNKNOWN, FirmwareReading, Slowdown
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
        self, script: list[BoardReading], *, enabled: bool = True, ceiling: Callable[[], int] = lambda: GIB
    ) -> None:
        self.script: Iterator[BoardReading] = iter(script)
        self.last = script[-1]
        self.reads = 0
        self.published: list[Limits] = []
        self.governor = Governor(
            thermal=THERMAL, config=ThermalSection(enabled=enabled), read=self.read, cpus=CPUS,
            memory_ceiling=ceiling, clock=LoopClock(asyncio.get_running_loop()), publish=self.published.append,
        )  # fmt: skip

    def read(self) -> BoardReading:
        self.reads += 1
        self.last = next(self.script, self.last)
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
