"""Read the clocks of a board: one frequency policy for each cluster of cores that share a clock.

A cluster whose cores are all offline keeps its folder and answers with errors: its clock is unknown then, never the
last one. Where there is no cpufreq at all (virtual machines, some containers) there is no policy. Reading the present
clock can ask a driver or firmware: not for the loop thread.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.sensors.probe import read_static, read_text

_HZ_PER_KHZ = 1000
_MAX_POLICIES = 64
_FIXED_EVERY = 60
"""What hardly changes is read with every so many samples."""
_POLICY_NAME = re.compile(r"policy(\d+)|cpu(\d+)")
_HIGHEST_HZ = 20_000_000_000
"""Above this a driver shows garbage."""


@dataclass(frozen=True, slots=True)
class FrequencyPolicy:
    """One cluster's clock. None: this board or its driver does not tell."""

    name: str
    """`policy0`."""
    cpus: frozenset[int]
    """The online CPUs that have this clock; empty when all of them are offline."""
    now_hz: int | None
    min_hz: int | None
    """Slowest that the hardware can run."""
    max_hz: int | None
    """Fastest that the hardware can run."""
    cap_hz: int | None
    """Fastest that policy allows at the moment: firmware, kernel and administrators lower it."""
    governor: str
    """`schedutil`, `ondemand`, …; empty when unknown."""
    driver: str
    cap_writable: bool
    """Whether this process may write `scaling_max_freq`."""


@dataclass(frozen=True, slots=True)
class _Fixed:
    """What of a cluster hardly ever changes."""

    min_hz: int | None
    max_hz: int | None
    driver: str
    cap_writable: bool


class PolicyReader:
    """Reads every cluster's clock again and again; what is fixed, once in a minute. Owned by one thread."""

    def __init__(self, sys_root: Path) -> None:
        self._root = sys_root / "devices" / "system" / "cpu"
        self._fixed: dict[Path, _Fixed] = {}
        self._looks = 0

    def read(self) -> tuple[FrequencyPolicy, ...]:
        """Return the clocks in the order of their first CPU; empty where there is no cpufreq."""
        if self._looks % _FIXED_EVERY == 0:
            folders = list((self._root / "cpufreq").glob("policy*")) or list(self._root.glob("cpu[0-9]*/cpufreq"))
            self._fixed = {folder: _read_fixed(folder) for folder in sorted(folders, key=_index)[:_MAX_POLICIES]}
        self._looks = self._looks + 1 if self._fixed else 0  # while there is none, look for one each time
        return tuple(_read(folder, fixed) for folder, fixed in self._fixed.items())


def read_policies(sys_root: Path) -> tuple[FrequencyPolicy, ...]:
    """Return every cluster's clock once."""
    return PolicyReader(sys_root).read()


def _index(folder: Path) -> int:
    match = _POLICY_NAME.fullmatch(folder.name) or _POLICY_NAME.fullmatch(folder.parent.name)
    return int(match[1] or match[2]) if match else _MAX_POLICIES


def _read_fixed(folder: Path) -> _Fixed:
    return _Fixed(
        min_hz=_hz(folder / "cpuinfo_min_freq"),
        max_hz=_hz(folder / "cpuinfo_max_freq"),
        driver=read_static(folder / "scaling_driver") or "",
        cap_writable=os.access(folder / "scaling_max_freq", os.W_OK),
    )


def _read(folder: Path, fixed: _Fixed) -> FrequencyPolicy:
    words = (read_static(folder / "affected_cpus") or "").split()
    return FrequencyPolicy(
        name=folder.name if folder.name.startswith("policy") else folder.parent.name,
        cpus=frozenset(int(word) for word in words if word.isdigit()),
        now_hz=_hz(folder / "scaling_cur_freq") or _hz(folder / "cpuinfo_cur_freq"),
        min_hz=fixed.min_hz,
        max_hz=fixed.max_hz,
        cap_hz=_hz(folder / "scaling_max_freq"),
        governor=read_static(folder / "scaling_governor") or "",
        driver=fixed.driver,
        cap_writable=fixed.cap_writable,
    )


def _hz(path: Path) -> int | None:
    """Return a frequency; None for `<unknown>`, 0, an error, or what no CPU runs at."""
    try:
        text = read_text(path)
    except OSError:
        return None
    hz = int(text) * _HZ_PER_KHZ if text.isdigit() else 0
    return hz if 0 < hz <= _HIGHEST_HZ else None
