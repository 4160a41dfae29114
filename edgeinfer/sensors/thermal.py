"""Tell the board's temperature from the kernel's thermal zones, and from hwmon where those don't tell.

Owns which zones are believed, and one probe (a thread) for each of them. Zones are chosen by type, because their index
changes between boots; `cpu-thermal` and `cpu_thermal` are one name. The temperature is that of the hottest of them that
can be believed, whichever its type: they share the board's trips. Temperatures of hwmon (`hwmon:k10temp/Tctl`) are
asked only while there is no wanted zone, or none that can be believed: mostly they are the same registers once more.
What to do about it is the governor's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.sensors import hwmon
from edgeinfer.sensors.probe import Probe, ThreadProbe, Waiting, read_static, read_text
from edgeinfer.sensors.state import ChangeLog, SensorState
from edgeinfer.sensors.trips import KernelTrip, read_trips
from edgeinfer.sensors.zone import Belief, Fault, Stillness, frozen, observe, parse_temp, watch

_BLOCKED_NS = 2 * NS_PER_S
"""A driver that takes longer than this is blocked; slow ones (I2C) take some 20 ms."""
_RESCAN_NS = 30 * NS_PER_S
_SEARCH_NS = 2 * NS_PER_S
"""How soon to look again while no zone can be believed."""
_MAX_ZONES = 16
"""Bound of the threads: no board has more zones that tell the CPU's temperature."""
_TRIPS_EVERY = 60
"""Trip points are read with every so many samples: they change, but rarely."""

_ZONE_NAME = re.compile(r"thermal_zone(\d+)")


@dataclass(frozen=True, slots=True)
class ZoneReading:
    """One zone that is believed to tell the CPU's temperature."""

    name: str
    """`thermal_zone0`, or `hwmon2/temp1`."""
    type: str
    state: SensorState
    temp_mc: int | None
    """Last confirmed; None in a fault."""
    raw_mc: int | None
    """The newest sample as it came; None when it was none."""
    detail: str
    trips: tuple[KernelTrip, ...]


@dataclass(frozen=True, slots=True)
class ThermalReading:
    """The board's temperature, or why there is none."""

    temp_mc: int | None
    """None when `state` is a fault, and before the first sample was confirmed."""
    zone: str
    """Type of the zone that `temp_mc` is from; empty without one."""
    state: SensorState
    detail: str = ""
    zones: tuple[ZoneReading, ...] = ()
    unused: tuple[str, ...] = ()
    """Types of the zones that are there but tell something else (Wi-Fi, GPU, placeholders)."""


@dataclass(frozen=True, slots=True)
class ZoneSample:
    """What one look at a zone's files said."""

    type: str
    temp: str
    trips: tuple[KernelTrip, ...] | None
    """None when they weren't read this time."""


class MakeProbe(Protocol):
    """How a zone is asked: `ThreadProbe`, or `InlineProbe` in tests."""

    def __call__(self, name: str, read: Callable[[], ZoneSample], /) -> Probe[ZoneSample]:
        """Return a probe named `name` that asks by calling `read`."""
        ...


@dataclass(slots=True)
class _Zone:
    name: str
    type: str
    rank: int
    probe: Probe[ZoneSample]
    belief: Belief = field(default_factory=Belief)
    still: Stillness | None = None
    raw_mc: int | None = None
    sampled_ns: int | None = None
    trips: tuple[KernelTrip, ...] = ()
    frozen: bool = False

    def learn(self, sample: int | Fault, now_ns: int) -> None:
        elapsed_ns = 0 if self.sampled_ns is None else now_ns - self.sampled_ns
        self.belief, self.sampled_ns = observe(self.belief, sample, elapsed_ns), now_ns

    def reading(self) -> ZoneReading:
        state, temp_mc, detail = self.belief.state, self.belief.temp_mc, self.belief.detail
        if self.frozen and not state.fault and self.still is not None:
            seconds = (self.still.seen_ns - self.still.since_ns) // NS_PER_S
            state, temp_mc, detail = SensorState.FROZEN, None, f"{self.raw_mc} for {seconds} s while the load moved"
        return ZoneReading(self.name, self.type, state, temp_mc, self.raw_mc, detail, self.trips)


class ThermalReader:
    """Reads the zones of the wanted types. Loop thread only; `read` never waits more than 2 ms for a zone."""

    def __init__(
        self,
        sys_root: Path,
        zone_types: Sequence[str],
        *,
        clock: Clock,
        make_probe: MakeProbe = ThreadProbe,
    ) -> None:
        self._sys_root = sys_root
        self._folder = sys_root / "class" / "thermal"
        self._chips = list(dict.fromkeys(item for item in zone_types if item.startswith(hwmon.PREFIX)))
        self._wanted = list(dict.fromkeys(_spelling(item) for item in zone_types if item not in self._chips))
        self._faulty = False
        self._clock = clock
        self._make_probe = make_probe
        self._zones: dict[str, _Zone] = {}
        self._hanging: list[Probe[ZoneSample]] = []
        """Of zones that have gone while their driver hung: their threads are still there."""
        self._unused: tuple[str, ...] = ()
        self._next_scan_ns: int | None = None
        self._none_yet = False
        self._changes = ChangeLog()

    def read(self, busy_share: float | None = None) -> ThermalReading:
        """Return what the zones say now.

        `busy_share` is the share of all cores that is busy (0 to 1): by it a sensor that stands still because
        nothing happens is told from one that is frozen. None: unknown.
        """
        now_ns = self._clock.now_ns()
        if self._next_scan_ns is None or now_ns >= self._next_scan_ns:
            self._scan()
            self._next_scan_ns = now_ns + _RESCAN_NS
        for zone in self._zones.values():
            self._sample(zone, busy_share, now_ns)
        zones = tuple(zone.reading() for zone in self._ranked())
        for item in zones:
            self._changes.note(f"{item.name}({item.type})", item.state, item.detail, now_ns)
        reading = self._choose(zones)
        self._faulty = reading.state.fault
        if self._faulty:
            self._next_scan_ns = min(self._next_scan_ns, now_ns + _SEARCH_NS)
        if not zones or self._none_yet:
            self._changes.note("thermal", reading.state, reading.detail or f"zone {reading.zone}", now_ns)
            self._none_yet = not zones
        return reading

    def close(self) -> None:
        """End the probes' threads."""
        for zone in self._zones.values():
            zone.probe.close()
        self._zones.clear()

    def _ranked(self) -> list[_Zone]:
        return sorted(self._zones.values(), key=lambda zone: (zone.rank, zone.name))

    def _choose(self, zones: Sequence[ZoneReading]) -> ThermalReading:
        usable = [(item.temp_mc, item) for item in zones if not item.state.fault and item.temp_mc is not None]
        if usable:
            temp_mc, worst = max(usable, key=lambda pair: pair[0])  # of two alike the more preferred
            return ThermalReading(temp_mc, worst.type, worst.state, worst.detail, tuple(zones), self._unused)
        if not zones:
            there = ", ".join(self._unused) or "none at all"
            wanted = ", ".join((*self._wanted, *self._chips))
            detail = f"no zone of type {wanted} in {self._folder} (there: {there})"
            return ThermalReading(None, "", SensorState.MISSING, detail, (), self._unused)
        waiting = [item for item in zones if not item.state.fault]
        first = (waiting or zones)[0]  # a zone about to be confirmed outranks a faulty one
        detail = f"{first.name}({first.type}): {first.detail}"
        return ThermalReading(None, "", first.state, detail, tuple(zones), self._unused)

    def _sample(self, zone: _Zone, busy_share: float | None, now_ns: int) -> None:
        answer = zone.probe.poll(now_ns)
        if isinstance(answer, Waiting):
            if now_ns - answer.since_ns < _BLOCKED_NS:
                return  # the last belief stands
            zone.raw_mc = None
            seconds = (now_ns - answer.since_ns) / NS_PER_S
            zone.learn(Fault(SensorState.BLOCKED, f"no answer for {seconds:.0f} s"), now_ns)
            return
        sample = _judge(zone, answer)
        zone.raw_mc = sample if isinstance(sample, int) else None
        zone.learn(sample, now_ns)
        if isinstance(sample, int):
            zone.still = watch(zone.still, sample, busy_share, now_ns)
            zone.frozen = frozen(zone.still)

    def _scan(self) -> None:
        """Find the zones of the wanted types; forget those that have become something else."""
        found: dict[str, str] = {}
        try:
            names = sorted(path.name for path in self._folder.iterdir())
        except OSError:
            names = []
        for name in names:
            if _ZONE_NAME.fullmatch(name) and (kind := read_static(self._folder / name / "type")):
                found[name] = kind
        wanted = {name: kind for name, kind in found.items() if _spelling(kind) in self._wanted}
        self._unused = tuple(sorted(kind for name, kind in found.items() if name not in wanted))
        for name, zone in list(self._zones.items()):
            if zone.type.startswith(hwmon.PREFIX):
                continue
            replaced = any(kind == zone.type and other not in self._zones for other, kind in wanted.items())
            if (name in found and wanted.get(name) != zone.type) or (name not in found and replaced):
                self._forget(name)
        for name, kind in wanted.items():
            self._add(name, kind, self._wanted.index(_spelling(kind)), _look(self._folder / name))
        if self._chips:
            self._scan_chips(needed=not wanted or self._faulty)

    def _scan_chips(self, *, needed: bool) -> None:
        """Find the wanted temperatures of hwmon, when no zone tells; forget those whose chip has another index now."""
        if not needed and not any(zone.type.startswith(hwmon.PREFIX) for zone in self._zones.values()):
            return
        found = {item.name: item for item in hwmon.find_temperatures(self._sys_root)}
        for name, zone in list(self._zones.items()):
            if zone.type.startswith(hwmon.PREFIX) and (name not in found or found[name].type != zone.type):
                self._forget(name)
        if not needed:
            return
        for rank, wanted in enumerate(self._chips, len(self._wanted)):
            for item in found.values():
                if hwmon.matches(wanted, item):
                    self._add(item.name, item.type, rank, _look_chip(item))

    def _forget(self, name: str) -> None:
        probe = self._zones.pop(name).probe
        probe.close()
        self._hanging.append(probe)

    def _add(self, name: str, kind: str, rank: int, look: Callable[[], ZoneSample]) -> None:
        self._hanging = [probe for probe in self._hanging if probe.hanging]
        if name not in self._zones and len(self._zones) + len(self._hanging) < _MAX_ZONES:
            self._zones[name] = _Zone(name, kind, rank, self._make_probe(name, look))


def _judge(zone: _Zone, answer: ZoneSample | OSError) -> int | Fault:
    """Turn a probe's answer into a temperature or a fault; keep the trip points."""
    if isinstance(answer, PermissionError):
        return Fault(SensorState.NO_PERMISSION, f"{answer.filename}: {answer.strerror}")
    if isinstance(answer, OSError):
        return Fault(SensorState.MISSING, f"{answer.strerror or answer}")
    if answer.trips is not None:
        zone.trips = answer.trips
    if answer.type != zone.type:
        return Fault(SensorState.MISSING, f"is now of type {answer.type!r}")
    return parse_temp(answer.temp)


def _look(folder: Path) -> Callable[[], ZoneSample]:
    """Return what a probe's thread runs: read the files of one zone."""
    looks = 0

    def look() -> ZoneSample:
        nonlocal looks
        trips = read_trips(folder) if looks % _TRIPS_EVERY == 0 else None
        looks += 1
        return ZoneSample(read_text(folder / "type"), read_text(folder / "temp"), trips)

    return look


def _look_chip(item: hwmon.HwmonTemperature) -> Callable[[], ZoneSample]:
    """Return what a probe's thread runs: read one temperature of hwmon, which has no trip points."""

    def look() -> ZoneSample:
        chip = read_text(item.path.parent / "name")  # the index may have become another chip's
        return ZoneSample(f"{hwmon.PREFIX}{chip}/{item.label}", read_text(item.path), None)

    return look


def _spelling(zone_type: str) -> str:
    return zone_type.strip().lower().replace("_", "-")
