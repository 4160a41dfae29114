"""Watch the kernel's counters of how often the hardware has slowed itself down.

Intel counts in each core's `thermal_throttle`, Jetson counts over-current events in a hwmon chip of soctherm. A counter
tells nothing by its value, only by having grown since the last look.
"""

from __future__ import annotations

from pathlib import Path

from edgeinfer.sensors.hwmon import find_chips
from edgeinfer.sensors.probe import read_text

_MAX_COUNTERS = 256
_OVER_CURRENT_CHIP = "soctherm_oc"


def thermal_counts(sys_root: Path) -> list[Path]:
    """Return the counters of thermal throttling (Intel); empty on other boards."""
    root = sys_root / "devices" / "system" / "cpu"
    cores = sorted(root.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"))
    packages = sorted(root.glob("cpu[0-9]*/thermal_throttle/package_throttle_count"))
    return [*packages[:1], *cores[: _MAX_COUNTERS - 1]]  # every core of a package shows the same; boards have one


def power_counts(sys_root: Path) -> list[Path]:
    """Return the counters of over-current throttling (Jetson); empty on other boards."""
    chips = [chip.folder for chip in find_chips(sys_root) if chip.name == _OVER_CURRENT_CHIP]
    return sorted(path for folder in chips for path in folder.glob("oc*_event_cnt"))[:_MAX_COUNTERS]


class GrowthMeter:
    """Tells whether any of some counters has grown since the last look. Owned by one reader."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._last: dict[Path, int] = {}

    def __bool__(self) -> bool:
        """Return whether there is anything to look at."""
        return bool(self._paths)

    @property
    def name(self) -> str:
        """Return what the first counter is called; empty without one."""
        return self._paths[0].name if self._paths else ""

    def grown(self) -> Path | None:
        """Return one counter that has grown since the last look; None when none has.

        One that cannot be read (its core is offline) is left out; when it comes back it starts anew.
        """
        grown = None
        for path in self._paths:
            try:
                count = int(read_text(path))
            except (OSError, ValueError):
                self._last.pop(path, None)
                continue
            if count > self._last.get(path, count):
                grown = path
            self._last[path] = count
        return grown
