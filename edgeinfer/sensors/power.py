"""Find what tells how much power the board draws, and read it: rails of hwmon chips, energy counters of powercap.

A rail is measured by a chip such as Jetson's INA3221 (a voltage and a current) or an INA226 (a power). A powercap
domain (RAPL on x86) counts energy; since kernel 5.10 only root may read it, because it tells attackers about secrets:
that is the state `no_permission`, and docs/thermal.md has the udev rule that lifts it. Nothing is ever added up:
sub-rails are part of what the rail above them shows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.sensors.hwmon import HwmonChip, find_chips, inputs, label
from edgeinfer.sensors.probe import read_static, read_text

WHOLE_BOARD = ("VDD_IN", "POM_5V_IN", "SYS_VIN", "package-0", "psys")
"""What tells of the whole board, or of most of it, where the board file names no rail; first come, first taken."""
_MAX_SOURCES = 64
_DOMAIN_NAME = re.compile(r"[a-z-]+(:\d+)+")
_HIGHEST_MW = 2_000_000
"""More than two kilowatts is no board: garbage."""
_HIGHEST_NUMBER = (1 << 64) - 1
_LONGEST_DIGITS = 20


@dataclass(frozen=True, slots=True)
class Rail:
    """A power rail that a hwmon chip measures. Of voltage and current, or power, what it has is set."""

    name: str
    """Its label: `VDD_IN`; where the driver has none, `CHIP/power1`."""
    chip: str
    voltage: Path | None
    """Millivolts."""
    current: Path | None
    """Milliamperes."""
    power: Path | None
    """Microwatts."""


@dataclass(frozen=True, slots=True)
class EnergyDomain:
    """A powercap domain: a counter of microjoules that goes back to 0 beyond `range_uj`."""

    name: str
    """`package-0`, `core`, `psys`."""
    counter: Path
    range_uj: int
    """0 when the driver does not say."""


@dataclass(frozen=True, slots=True)
class PowerSample:
    """One look at a rail or domain: exactly one of the two numbers is set."""

    power_mw: int | None
    energy_uj: int | None


def find_rails(sys_root: Path) -> list[Rail]:
    """Return the rails of all chips, in the chips' order. Reads names and labels only."""
    return [rail for chip in find_chips(sys_root) for rail in _rails(chip)][:_MAX_SOURCES]


def _rails(chip: HwmonChip) -> list[Rail]:
    rails = []
    measured = set()
    for number, path in inputs(chip, "power"):
        text = label(chip, "power", number)
        rails.append(Rail(f"{chip.name}/{text}" if text.startswith("power") else text, chip.name, None, None, path))
        measured.add(number)
    voltages = dict(inputs(chip, "in"))
    for number, path in inputs(chip, "curr"):
        text = read_static(chip.folder / f"in{number}_label") or ""
        if number in measured or number not in voltages or not text or text.startswith("sum of"):
            continue  # without a label nobody knows what it feeds; INA3221's fourth is the sum of shunt voltages
        rails.append(Rail(text, chip.name, voltages[number], path, None))
    return rails


def find_domains(sys_root: Path) -> list[EnergyDomain]:
    """Return the powercap domains that count energy, parents first."""
    found: list[tuple[list[str], EnergyDomain]] = []
    for folder in (sys_root / "class" / "powercap").glob("*:*"):
        name, counter = read_static(folder / "name"), folder / "energy_uj"
        if not _DOMAIN_NAME.fullmatch(folder.name) or not name or not counter.exists():
            continue
        if folder.name.startswith("intel-rapl-mmio"):
            continue  # the same counters once more, by another way
        top = read_static(folder / "max_energy_range_uj") or ""
        range_uj = int(top) if top.isdigit() and len(top) < _LONGEST_DIGITS else 0
        found.append((folder.name.split(":"), EnergyDomain(name, counter, range_uj)))
    return [domain for _, domain in sorted(found, key=lambda pair: (len(pair[0]), pair[0]))[:_MAX_SOURCES]]


def choose(rails: Sequence[Rail], domains: Sequence[EnergyDomain], wanted: Sequence[str]) -> Rail | EnergyDomain | None:
    """Return what is read for the board's power: the first of `wanted`, else what tells of the whole board."""
    sources: list[Rail | EnergyDomain] = [*rails, *domains]
    for name in (*wanted, *WHOLE_BOARD):
        for source in sources:
            if source.name == name:
                return source
    return None


def read_power(source: Rail | EnergyDomain) -> PowerSample:
    """Read it once. May block as long as the driver does: not for the loop thread.

    Raises:
        PermissionError: only root may.
        OSError: the driver's own error, or an answer that cannot be.
    """
    if isinstance(source, EnergyDomain):
        return PowerSample(None, _number(source.counter))
    if source.power is not None:
        milliwatts = _number(source.power) // 1000
    else:
        assert source.voltage is not None
        assert source.current is not None
        milliwatts = _number(source.voltage) * _number(source.current) // 1000
    if milliwatts > _HIGHEST_MW:
        raise OSError(f"{source.name}: {milliwatts // 1_000_000} kW is more than any board draws")
    return PowerSample(milliwatts, None)


def _number(path: Path) -> int:
    """Return a number of 0 or more; a chip on a rail that feeds back shows a small negative current: 0."""
    text = read_text(path)
    try:
        value = max(0, int(text))
    except ValueError:
        raise OSError(f"{path}: {text[:40]!r} is not a number") from None
    if value > _HIGHEST_NUMBER:
        raise OSError(f"{path}: {text[:40]!r} has more than 64 bits")
    return value
