"""Find what the kernel's hwmon class shows: chips with temperatures, voltages, currents and power.

Finding looks only at names and labels, which no hardware is asked for, so it may be done in the loop thread; values are
read by whoever wants them, through a probe. The index of a chip changes from boot to boot: chips are known by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.sensors.probe import read_static, read_text
from edgeinfer.sensors.trips import is_threshold

PREFIX = "hwmon:"
"""Marks, in a board file's `thermal.zones`, a temperature of hwmon: `hwmon:CHIP` or `hwmon:CHIP/LABEL`."""
_MAX_CHIPS = 64
_MAX_INPUTS = 64
_CHIP_NAME = re.compile(r"hwmon(\d+)")
_INPUT = re.compile(r"(temp|in|curr|power)(\d+)_(?:input|average)")


@dataclass(frozen=True, slots=True)
class HwmonChip:
    """One chip."""

    folder: Path
    name: str
    """The driver's name for it: `coretemp`, `k10temp`, `ina3221`, `rpi_volt`."""


@dataclass(frozen=True, slots=True)
class HwmonTemperature:
    """One temperature of a chip; `path` is read for its value, in millidegrees."""

    path: Path
    chip: str
    label: str
    """`Package id 0`, `Tctl`; where the driver has none, the file's stem: `temp1`."""

    @property
    def type(self) -> str:
        """How a board file names it."""
        return f"{PREFIX}{self.chip}/{self.label}"

    @property
    def name(self) -> str:
        """Where it is at the moment: `hwmon2/temp1`."""
        return f"{self.path.parent.name}/{self.path.name.partition('_')[0]}"


def find_chips(sys_root: Path) -> list[HwmonChip]:
    """Return the chips, by index."""
    found = []
    try:
        folders = [path for path in (sys_root / "class" / "hwmon").iterdir() if _CHIP_NAME.fullmatch(path.name)]
    except OSError:
        return []
    for folder in sorted(folders, key=lambda path: int(path.name[5:]))[:_MAX_CHIPS]:
        name = read_static(folder / "name")
        if name:
            found.append(HwmonChip(folder, name))
    return found


def inputs(chip: HwmonChip, kind: str) -> Iterator[tuple[int, Path]]:
    """Yield the number and the file of each input of one kind (`temp`, `in`, `curr`, `power`), by number."""
    try:
        names = [path.name for path in chip.folder.iterdir()]
    except OSError:
        return  # it went away meanwhile
    matches = sorted(
        (int(match[2]), match[0].endswith("average"), match[0])
        for name in names
        if (match := _INPUT.fullmatch(name)) and match[1] == kind
    )
    last = -1
    for number, _, name in matches[:_MAX_INPUTS]:  # of an input and its average, the input
        if number != last:
            yield number, chip.folder / name
        last = number


def label(chip: HwmonChip, kind: str, number: int) -> str:
    """Return what the driver calls an input, or the beginning of its file's name."""
    return read_static(chip.folder / f"{kind}{number}_label") or f"{kind}{number}"


def find_temperatures(sys_root: Path) -> list[HwmonTemperature]:
    """Return every temperature of every chip."""
    return [
        HwmonTemperature(path, chip.name, label(chip, "temp", number))
        for chip in find_chips(sys_root)
        for number, path in inputs(chip, "temp")
    ]


def read_thresholds(found: HwmonTemperature) -> dict[str, int]:
    """Return the driver's thresholds in millidegrees (`max`, `crit`), without placeholders such as 0 and -273150.

    Asks the hardware: not for the loop thread.
    """
    stem = str(found.path).rpartition("_")[0]
    return {name: value for name in ("max", "crit") if (value := _threshold(f"{stem}_{name}")) is not None}


def matches(wanted: str, found: HwmonTemperature) -> bool:
    """Return whether a board file's `hwmon:CHIP` or `hwmon:CHIP/LABEL` means this temperature."""
    chip, _, text = wanted.removeprefix(PREFIX).partition("/")
    return chip.replace("_", "-") == found.chip.replace("_", "-") and text in {"", found.label}


def _threshold(path: str) -> int | None:
    try:
        value = int(read_text(path))
    except (OSError, ValueError):
        return None
    return value if is_threshold(value) else None
