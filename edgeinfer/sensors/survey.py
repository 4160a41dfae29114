"""List every sensor that a board has, what it says, whether it is used, and why: for people, once.

Each sensor is asked through a thread of its own, so that one that hangs is a line of the list and holds nothing up. The
daemon reads less: only what is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.artifact.board import Board
from edgeinfer.clock import NS_PER_MS, NS_PER_S, Clock
from edgeinfer.sensors import hwmon
from edgeinfer.sensors.cooling import read_cooling
from edgeinfer.sensors.findings import (
    Finding,
    celsius,
    chips_found,
    clocks_found,
    cooling_found,
    cpus_found,
    firmware_found,
    powers_found,
    zones_found,
)
from edgeinfer.sensors.power import EnergyDomain, PowerSample, Rail, find_domains, find_rails, read_power
from edgeinfer.sensors.probe import ThreadProbe, Waiting, read_static, read_text
from edgeinfer.sensors.sampling import BoardReading, BoardSensors
from edgeinfer.sensors.state import SensorState
from edgeinfer.sensors.trips import KernelTrip, first_slowing, read_trips

_ROUND_NS = 100 * NS_PER_MS
_PATIENCE_NS = 2_300 * NS_PER_MS
"""A little more than a sensor has to answer in before it counts as blocked."""
_LEAST_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Survey:
    """All of them, and what is odd."""

    board: str
    reading: BoardReading
    findings: tuple[Finding, ...]
    remarks: tuple[str, ...]


def survey(board: Board, sys_root: Path, proc_root: Path, *, clock: Clock, sleep: Callable[[float], None]) -> Survey:
    """Ask every sensor; takes half a second, or somewhat over two when one does not answer."""
    sensors = BoardSensors(sys_root, proc_root, board.thermal.zones, clock=clock, rails=board.power.rails)
    chips = hwmon.find_temperatures(sys_root)
    types = {path.name: read_static(path / "type") or "?" for path in _zone_folders(sys_root)}
    sources: list[Rail | EnergyDomain] = [*find_rails(sys_root), *find_domains(sys_root)]
    zones = _Answers({path.name: _zone_look(path) for path in _zone_folders(sys_root)}, clock)
    temperatures = _Answers({item.name: _chip_look(item) for item in chips}, clock)
    powers = _Answers({f"{index}": _power_look(source) for index, source in enumerate(sources)}, clock)
    cooling = _Answers({"cooling": lambda: read_cooling(sys_root)}, clock)
    deadline_ns, rounds = clock.now_ns() + _PATIENCE_NS, 0
    while True:
        reading, rounds = sensors.read(), rounds + 1
        open_now = [answers.poll() for answers in (zones, temperatures, powers, cooling)]
        settled = reading.thermal.state is not SensorState.UNCONFIRMED and not any(open_now)
        if clock.now_ns() >= deadline_ns or (settled and rounds >= _LEAST_ROUNDS):
            break
        sleep(_ROUND_NS / NS_PER_S)
    for end in (sensors, zones, temperatures, powers, cooling):
        end.close()
    findings = (
        *zones_found(board, reading.thermal, types, zones.got),
        *chips_found(board, reading.thermal, chips, temperatures.got),
        firmware_found(reading.firmware),
        *clocks_found(reading.policies),
        *cooling_found(cooling.got),
        *powers_found(reading, sources, powers.got),
        *cpus_found(reading, sys_root, proc_root),
    )
    return Survey(board.name, reading, findings, tuple(_remarks(board, reading)))


class _Answers:
    """The newest answer of some sensors, each with its own thread."""

    def __init__(self, looks: dict[str, Callable[[], object]], clock: Clock) -> None:
        self._probes = {name: ThreadProbe(name, look) for name, look in looks.items()}
        self._clock = clock
        self.got: dict[str, object] = {}

    def poll(self) -> bool:
        """Ask those that have not answered yet; return whether some are still open."""
        for name in self._probes.keys() - self.got.keys():
            answer = self._probes[name].poll(self._clock.now_ns())
            if not isinstance(answer, Waiting):
                self.got[name] = answer
        return len(self.got) < len(self._probes)

    def close(self) -> None:
        for probe in self._probes.values():
            probe.close()


def _zone_folders(sys_root: Path) -> list[Path]:
    folders = (sys_root / "class" / "thermal").glob("thermal_zone*")
    return sorted(folders, key=lambda path: (len(path.name), path.name))


def _zone_look(folder: Path) -> Callable[[], tuple[str, tuple[KernelTrip, ...]]]:
    return lambda: (read_text(folder / "temp"), read_trips(folder))


def _chip_look(item: hwmon.HwmonTemperature) -> Callable[[], tuple[str, tuple[KernelTrip, ...]]]:
    def look() -> tuple[str, tuple[KernelTrip, ...]]:
        limits = sorted(hwmon.read_thresholds(item).items(), key=lambda pair: pair[1])
        return read_text(item.path), tuple(KernelTrip(name, temp_mc, 0) for name, temp_mc in limits)

    return look


def _power_look(source: Rail | EnergyDomain) -> Callable[[], PowerSample]:
    return lambda: read_power(source)


def _remarks(board: Board, reading: BoardReading) -> Iterator[str]:
    thermal = reading.thermal
    if thermal.temp_mc is None:
        share = board.thermal.fault_duty_cycle
        yield f"no temperature ({thermal.state}: {thermal.detail}); duty cycle {share:.2f} holds (fault_duty_cycle)"
    trip = first_slowing(trip for zone in thermal.zones for trip in zone.trips)
    limit_mc = board.thermal.firmware_trip_c
    if trip is not None and trip.temp_mc < limit_mc:
        yield (
            f"the kernel's {trip.kind} trip is at {celsius(trip.temp_mc)}, below firmware_trip_c of {board.name} "
            f"({celsius(limit_mc)}): lower that and the trips below it"
        )
