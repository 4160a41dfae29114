"""Read what the kernel does about heat: its cooling devices, from fans to caps of the clock."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from edgeinfer.sensors.probe import read_static, read_text

_MAX_DEVICES = 64
_NAME = re.compile(r"cooling_device(\d+)")
_CPU = re.compile(r"(thermal-)?(cpufreq|idle)|Processor|intel_powerclamp", re.IGNORECASE)
_FAN = re.compile(r".*fan", re.IGNORECASE)
_OTHER_CLOCK = re.compile(r"(thermal-)?devfreq", re.IGNORECASE)


class Cooler(StrEnum):
    """What a cooling device costs us while it acts."""

    CPU = "cpu"
    """It slows the CPU down: lower clock, or forced idling."""
    FAN = "fan"
    CLOCK = "clock"
    """It slows something else down: GPU, memory, NPU."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class CoolingDevice:
    """One cooling device at this moment."""

    name: str
    """`cooling_device0`."""
    type: str
    """As the driver calls it: `cpufreq-cpu0`, `thermal-cpufreq-0`, `pwm-fan`, `Processor`."""
    kind: Cooler
    state: int
    """0: it does nothing."""
    max_state: int | None


def cooler_kind(device_type: str) -> Cooler:
    """Return what a cooling device of this type does."""
    if _CPU.match(device_type):
        return Cooler.CPU
    if _FAN.match(device_type):
        return Cooler.FAN
    return Cooler.CLOCK if _OTHER_CLOCK.match(device_type) else Cooler.OTHER


def read_cooling(sys_root: Path) -> tuple[CoolingDevice, ...]:
    """Return the cooling devices that answer, by index. May block as long as a driver does: not for the loop thread."""
    found: list[tuple[int, CoolingDevice]] = []
    for folder in (sys_root / "class" / "thermal").glob("cooling_device*"):
        match = _NAME.fullmatch(folder.name)
        kind = read_static(folder / "type")
        if match is None or not kind:
            continue
        try:
            state = int(read_text(folder / "cur_state"))
        except (OSError, ValueError):
            continue  # one that is going away; the others still tell
        top = read_static(folder / "max_state") or ""
        device = CoolingDevice(
            folder.name, kind, cooler_kind(kind),
            max(state, 0),  # intel_powerclamp says -1 while it is off
            int(top) if top.isdigit() else None,
        )  # fmt: skip
        found.append((int(match[1]), device))
    return tuple(device for _, device in sorted(found, key=lambda pair: pair[0])[:_MAX_DEVICES])
