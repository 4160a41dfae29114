"""Say of each sensor what it tells, whether it is used, and why: pure, from answers that were gathered before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.artifact.board import Board
from edgeinfer.sensors.cooling import Cooler, CoolingDevice
from edgeinfer.sensors.cpu import load_average
from edgeinfer.sensors.cpufreq import FrequencyPolicy
from edgeinfer.sensors.firmware import FirmwareReading, Slowdown, ThrottleFlags
from edgeinfer.sensors.hwmon import PREFIX, HwmonTemperature, matches
from edgeinfer.sensors.power import EnergyDomain, PowerSample, Rail
from edgeinfer.sensors.probe import read_static
from edgeinfer.sensors.sampling import BoardReading
from edgeinfer.sensors.state import SensorState
from edgeinfer.sensors.thermal import ThermalReading, ZoneReading
from edgeinfer.sensors.trips import KernelTrip
from edgeinfer.sensors.zone import Fault, parse_temp

Answers = Mapping[str, object]
"""What each sensor answered, by name: its value, or an `OSError`; one that is missing has not answered."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One sensor of the board."""

    kind: str
    """`temperature`, `firmware`, `clock`, `cooling`, `power` or `cpu`."""
    where: str
    """Where it is at the moment: `thermal_zone0`, `hwmon1/temp1`, `policy4`."""
    name: str
    """What it is: a zone's type, a rail's label, a driver."""
    state: SensorState
    value: str
    """For people; empty in a fault."""
    number: int | None
    """The same in millidegrees, hertz, milliwatts or, of a cooling device, steps; None where it is no number."""
    used: bool
    why: str
    """Why it is used or not, and what is wrong with it."""
    trips: tuple[KernelTrip, ...] = ()
    """Of a zone; of hwmon the driver's `max` and `crit`, without placeholders."""


def fault_of(answers: Answers, name: str) -> Fault | None:
    """Return what is wrong with a sensor that did not answer, or answered with an error."""
    answer = answers.get(name)
    if answer is None:
        return Fault(SensorState.BLOCKED, "does not answer")
    if isinstance(answer, PermissionError):
        return Fault(SensorState.NO_PERMISSION, f"{answer.filename}: {answer.strerror}")
    if isinstance(answer, OSError):
        absurd = answer.errno is None
        return Fault(SensorState.ABSURD if absurd else SensorState.MISSING, str(answer.strerror or answer))
    return None


def zones_found(board: Board, thermal: ThermalReading, types: Mapping[str, str], answers: Answers) -> Iterator[Finding]:
    """Yield every thermal zone; `types` says by name which there are."""
    believed = {item.name: item for item in thermal.zones}
    whys = {_spelling(item.zone): item.why for item in board.thermal.unused}
    for name, kind in types.items():
        if name in believed:
            yield _used(thermal, believed[name])
            continue
        fault, answer = fault_of(answers, name), answers.get(name)
        text, trips = answer if isinstance(answer, tuple) else ("", ())
        why = whys.get(_spelling(kind)) or f"not in thermal.zones of {board.name}"
        yield _temperature(name, kind, fault or parse_temp(text), why, trips)


def chips_found(
    board: Board, thermal: ThermalReading, chips: list[HwmonTemperature], answers: Answers
) -> Iterator[Finding]:
    """Yield every temperature of hwmon."""
    believed = {item.name: item for item in thermal.zones}
    for item in chips:
        if item.name in believed:
            yield _used(thermal, believed[item.name])
            continue
        answer = answers.get(item.name)
        text, limits = answer if isinstance(answer, tuple) else ("", ())
        sample = fault_of(answers, item.name) or parse_temp(text)
        listed = any(zone.startswith(PREFIX) and matches(zone, item) for zone in board.thermal.zones)
        why = "asked only while no zone can be believed" if listed else f"not in thermal.zones of {board.name}"
        yield _temperature(item.name, item.type, sample, why, limits)


def _temperature(where: str, name: str, sample: int | Fault, why: str, trips: tuple[KernelTrip, ...]) -> Finding:
    if isinstance(sample, Fault):
        text = f"{why}; {sample.detail}"
        return Finding("temperature", where, name, sample.state, "", None, used=False, why=text, trips=trips)
    value = celsius(sample)
    return Finding("temperature", where, name, SensorState.OK, value, sample, used=False, why=why, trips=trips)


def _used(thermal: ThermalReading, zone: ZoneReading) -> Finding:
    if zone.temp_mc is None:
        value, why = "", zone.detail
    elif zone.temp_mc == thermal.temp_mc and zone.type == thermal.zone:
        value, why = (
            celsius(zone.temp_mc),
            "the hottest that the board file lists: this is the temperature that counts",
        )
    else:
        value, why = celsius(zone.temp_mc), f"listed in the board file; {thermal.zone or 'another'} is hotter"
    return Finding(
        "temperature", zone.name, zone.type, zone.state, value, zone.temp_mc, used=True, why=why, trips=zone.trips
    )


def firmware_found(reading: FirmwareReading) -> Finding:
    """Return what tells of throttling."""
    if reading.slowdown is Slowdown.UNKNOWN and not reading.state.fault:
        why = "nothing here says whether firmware slows the board down; the temperature at which it would has to do"
        return Finding("firmware", "", "", SensorState.MISSING, "", None, used=False, why=why)
    value = {Slowdown.NONE: "at full speed", Slowdown.UNKNOWN: ""}.get(
        reading.slowdown, f"slowed down ({reading.slowdown})"
    )
    why = f"{reading.detail}; unknown is not taken for all is well" if reading.state.fault else _flags(reading.flags)
    return Finding("firmware", "", reading.source, reading.state, value, None, used=bool(reading.source), why=why)


def _flags(flags: ThrottleFlags | None) -> str:
    if flags is None:
        return "seconds of throttling are counted by it"
    now = [text for text, on in _named(flags, since=False) if on]
    since = [text for text, on in _named(flags, since=True) if on]
    text = f"0x{flags.bits:x}: now {', '.join(now) or 'nothing'}; since cleared {', '.join(since) or 'nothing'}"
    return f"{text} (seconds of throttling are counted by what is now)"


def _named(flags: ThrottleFlags, *, since: bool) -> Iterator[tuple[str, bool]]:
    yield "under-voltage", flags.under_voltage_seen if since else flags.under_voltage
    yield "frequency capped", flags.frequency_capped_seen if since else flags.frequency_capped
    yield "throttled", flags.throttled_seen if since else flags.throttled
    yield "soft limit", flags.soft_limit_seen if since else flags.soft_limit


def clocks_found(policies: tuple[FrequencyPolicy, ...]) -> Iterator[Finding]:
    """Yield every cluster's clock."""
    if not policies:
        why = "no cpufreq (a virtual machine, or no driver): the clock is taken to be the full one"
        yield Finding("clock", "", "", SensorState.MISSING, "", None, used=False, why=why)
    awake = [policy for policy in policies if policy.cpus] or policies
    fastest = max((policy.max_hz or 0 for policy in awake), default=0)
    for policy in policies:
        limits = f"{_mhz(policy.min_hz)} to {_mhz(policy.max_hz)} MHz, allowed {_mhz(policy.cap_hz)}"
        cap = "may be capped by us" if policy.cap_writable else "may not be capped by us"
        cpus = ",".join(map(str, sorted(policy.cpus))) or "none online"
        used = policy is next((item for item in awake if (item.max_hz or 0) == fastest), None)
        yield Finding(
            "clock", policy.name, f"{policy.driver or '?'}/{policy.governor or '?'}",
            SensorState.OK if policy.now_hz else SensorState.MISSING,
            f"{_mhz(policy.now_hz)} MHz" if policy.now_hz else "", policy.now_hz, used=used,
            why=f"CPUs {cpus}; {limits}; {cap}" + ("; the fastest cluster, where the work goes" if used else ""),
        )  # fmt: skip


def cooling_found(answers: Answers) -> Iterator[Finding]:
    """Yield every cooling device."""
    if fault_of(answers, "cooling") is not None:
        yield Finding("cooling", "", "", SensorState.BLOCKED, "", None, used=False, why="a driver does not answer")
        return
    devices = answers["cooling"]
    assert isinstance(devices, tuple)
    for device in devices:
        assert isinstance(device, CoolingDevice)
        used = device.kind is Cooler.CPU
        top = "?" if device.max_state is None else device.max_state
        why = "slows the CPU down: above 0 it counts as throttling" if used else f"{device.kind}: takes nothing from us"
        yield Finding(
            "cooling", device.name, device.type, SensorState.OK, f"{device.state} of {top}", device.state,
            used=used, why=why,
        )  # fmt: skip


def powers_found(reading: BoardReading, sources: list[Rail | EnergyDomain], answers: Answers) -> Iterator[Finding]:
    """Yield every rail and energy counter."""
    for index, source in enumerate(sources):
        where = source.counter.parent.name if isinstance(source, EnergyDomain) else source.chip
        used = source.name == reading.power.source
        fault, answer = fault_of(answers, f"{index}"), answers.get(f"{index}")
        milliwatts = answer.power_mw if isinstance(answer, PowerSample) else None
        if used and milliwatts is None:
            milliwatts = reading.power.power_mw
        why = "the board's power and joules" if used else "not the whole board, or not the first choice"
        if fault is not None:
            hint = "only root may read it; docs/thermal.md has a udev rule"
            why = hint if fault.state is SensorState.NO_PERMISSION else fault.detail
        value = "" if milliwatts is None else f"{milliwatts / 1000:.2f} W"
        if not value and isinstance(answer, PowerSample) and answer.energy_uj is not None:
            value = f"{answer.energy_uj / 1e6:.0f} J"
        state = SensorState.OK if fault is None else fault.state
        yield Finding("power", where, source.name, state, value, milliwatts, used=used and fault is None, why=why)
    if not sources:
        why = "no rail and no energy counter: joules are unknown here"
        yield Finding("power", "", "", SensorState.MISSING, "", None, used=False, why=why)


def cpus_found(reading: BoardReading, sys_root: Path, proc_root: Path) -> Iterator[Finding]:
    """Yield the CPUs and their load."""
    usable = ",".join(map(str, sorted(reading.cpus)))
    offline = read_static(sys_root / "devices" / "system" / "cpu" / "offline") or "none"
    why = f"usable by us: {usable}; offline: {offline}"
    yield Finding(
        "cpu", "", "online", SensorState.OK, f"{len(reading.cpus)} CPUs", len(reading.cpus), used=True, why=why
    )
    load = load_average(proc_root)
    busy = "" if reading.busy_share is None else f"{reading.busy_share:.0%} busy"
    state = SensorState.MISSING if reading.busy_share is None else SensorState.OK
    average = "unknown" if load is None else " ".join(f"{item:.2f}" for item in load)
    yield Finding("cpu", "", "load", state, busy, None, used=True, why=f"load average {average}")


def _spelling(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def celsius(temp_mc: int) -> str:
    """Format a temperature for people: `81.2 C`."""
    return f"{temp_mc / 1000:.1f} C"


def _mhz(hz: int | None) -> str:
    return "?" if hz is None else f"{hz / 1e6:.0f}"
