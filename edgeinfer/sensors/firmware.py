"""Tell whether firmware or kernel is slowing the board down at this moment, and why.

A Raspberry Pi says so in `get_throttled`, which is in sysfs or behind `vcgencmd`, and at least its supply is watched by
the `rpi_volt` chip; Intel and Jetson count how often the hardware slowed itself down; elsewhere a cooling device that
caps the clock says it. For a board that has none of them it is unknown, never "all is well".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.sensors.cooling import Cooler, read_cooling
from edgeinfer.sensors.counters import GrowthMeter, power_counts, thermal_counts
from edgeinfer.sensors.hwmon import find_chips
from edgeinfer.sensors.probe import read_text
from edgeinfer.sensors.state import SensorState
from edgeinfer.sensors.vcgencmd import Vcgencmd, is_raspberry

_ASK_NS = 5 * NS_PER_S
"""How often a program is started for the flags: it costs some milliseconds each time."""
_ASK_AGAIN_NS = 300 * NS_PER_S
"""And how often when it has failed: what is missing or forbidden stays so for a while."""

_UNDER_VOLTAGE = 1 << 0
_CAPPED = 1 << 1
_THROTTLED = 1 << 2
_SOFT_LIMIT = 1 << 3
_SINCE = 16
"""The same four bits again, this much higher: what has happened since they were cleared.

The kernel's under-voltage monitor (raspberrypi-hwmon) clears them with every poll, so on many systems they tell of the
last two seconds and not of the time since boot.
"""
_KNOWN_BITS = 0xF | 0xF << _SINCE


@dataclass(frozen=True, slots=True)
class ThrottleFlags:
    """A Raspberry Pi's `get_throttled`."""

    bits: int

    @property
    def under_voltage(self) -> bool:
        """The supply is too weak at this moment."""
        return bool(self.bits & _UNDER_VOLTAGE)

    @property
    def frequency_capped(self) -> bool:
        """The clock is capped at this moment, because of heat or of voltage."""
        return bool(self.bits & _CAPPED)

    @property
    def throttled(self) -> bool:
        """The clock is lowered at this moment, because of heat or of voltage."""
        return bool(self.bits & _THROTTLED)

    @property
    def soft_limit(self) -> bool:
        """The soft temperature limit (Pi 3 B+: 60 C) is in force at this moment."""
        return bool(self.bits & _SOFT_LIMIT)

    @property
    def under_voltage_seen(self) -> bool:
        """The supply was too weak since the bits were cleared."""
        return bool(self.bits & _UNDER_VOLTAGE << _SINCE)

    @property
    def frequency_capped_seen(self) -> bool:
        """The clock was capped since the bits were cleared."""
        return bool(self.bits & _CAPPED << _SINCE)

    @property
    def throttled_seen(self) -> bool:
        """The clock was lowered since the bits were cleared."""
        return bool(self.bits & _THROTTLED << _SINCE)

    @property
    def soft_limit_seen(self) -> bool:
        """The soft limit was in force since the bits were cleared."""
        return bool(self.bits & _SOFT_LIMIT << _SINCE)


class Slowdown(StrEnum):
    """What firmware or kernel is doing to the clock."""

    NONE = "none"
    THERMAL = "thermal"
    """Because of heat."""
    POWER = "power"
    """Because the supply is too weak."""
    UNKNOWN = "unknown"
    """This board doesn't tell."""


@dataclass(frozen=True, slots=True)
class FirmwareReading:
    """What firmware or kernel is doing, and who said so."""

    slowdown: Slowdown
    source: str = ""
    """`get_throttled`, `vcgencmd`, `rpi_volt`, a counter's name or the type of the cooling device; empty: unknown."""
    flags: ThrottleFlags | None = None
    """On a Raspberry Pi."""
    state: SensorState = SensorState.OK
    """A fault when a source that this board should have does not tell, whatever the others say."""
    detail: str = ""
    """What is wrong with it."""


UNKNOWN = FirmwareReading(Slowdown.UNKNOWN)


def parse_throttled(text: str) -> ThrottleFlags | None:
    """Return the flags of `throttled=0x50005` (vcgencmd), `0x50005` or `50005` (sysfs: hexadecimal without prefix).

    None for anything else, or when unknown bits are set: then it is not what we think it is.
    """
    match = re.fullmatch(r"(?:throttled=)?(?:0x)?([0-9a-fA-F]{1,8})", text.strip())
    if match is None:
        return None
    bits = int(match[1], 16)
    return ThrottleFlags(bits) if not bits & ~_KNOWN_BITS else None


def judge_flags(flags: ThrottleFlags, source: str = "get_throttled") -> FirmwareReading:
    """Return what the flags mean for the clock at this moment.

    With under-voltage present the slow-down is the supply's, whatever the temperature: firmware caps for either, and
    says so with the same bits.
    """
    slowed = flags.throttled or flags.frequency_capped or flags.soft_limit
    if flags.under_voltage:
        return FirmwareReading(Slowdown.POWER, source, flags)
    return FirmwareReading(Slowdown.THERMAL if slowed else Slowdown.NONE, source, flags)


class FirmwareReader:
    """Asks every source that this board has. Owned by one thread: it may block as long as the firmware does."""

    def __init__(self, sys_root: Path, proc_root: Path, *, clock: Clock, vcgencmd: Vcgencmd | None = None) -> None:
        self._sys_root = sys_root
        self._clock = clock
        self._vcgencmd = (vcgencmd or Vcgencmd()) if is_raspberry(proc_root) else None
        self._ask_ns: int | None = None
        self._answer: FirmwareReading = UNKNOWN
        self._thermal: GrowthMeter | None = None
        self._power: GrowthMeter | None = None

    def read(self) -> FirmwareReading:
        """Return what the board says now; a source that fails is told in `detail`, and the others are asked."""
        told = _sysfs_flags(self._sys_root)
        if told is UNKNOWN and self._vcgencmd is not None:
            told = self._program(self._vcgencmd)
        if told.flags is not None:
            return told
        supply = None if self._vcgencmd is None else _supply(self._sys_root)  # a Raspberry Pi's
        sources = (supply, *self._counters(), _coolers(self._sys_root))
        return _combine(told, sources)

    def _program(self, program: Vcgencmd) -> FirmwareReading:
        """Return what vcgencmd said; it is asked every few seconds, or minutes once it has failed."""
        now_ns = self._clock.now_ns()
        if self._ask_ns is None or now_ns >= self._ask_ns:
            self._answer = _ask(program)
            self._ask_ns = now_ns + (_ASK_NS if self._answer.flags is not None else _ASK_AGAIN_NS)
        return self._answer

    def _counters(self) -> list[FirmwareReading]:
        if self._thermal is None or self._power is None:
            self._thermal = GrowthMeter(thermal_counts(self._sys_root))
            self._power = GrowthMeter(power_counts(self._sys_root))
        found = []
        if (grown := self._power.grown()) is not None:
            found.append(FirmwareReading(Slowdown.POWER, grown.name))  # and else: it knows nothing of heat
        if (grown := self._thermal.grown()) is not None:
            found.append(FirmwareReading(Slowdown.THERMAL, grown.name))
        elif self._thermal:
            found.append(FirmwareReading(Slowdown.NONE, self._thermal.name))
        return found


_RANK = {Slowdown.UNKNOWN: 0, Slowdown.NONE: 1, Slowdown.THERMAL: 2, Slowdown.POWER: 3}
"""Of what several sources say, the worst holds; a weak supply explains a low clock better than heat does."""


def read_firmware(sys_root: Path) -> FirmwareReading:
    """Ask once what is in sysfs; counters need two looks, see `FirmwareReader`. Not for the loop thread."""
    told = _sysfs_flags(sys_root)
    if told.flags is not None:
        return told
    return _combine(told, (_supply(sys_root), _coolers(sys_root)))


def _combine(told: FirmwareReading, others: Iterable[FirmwareReading | None]) -> FirmwareReading:
    """Return the worst of what `others` say, with the fault of what told nothing."""
    worst = max((item for item in others if item), key=lambda item: _RANK[item.slowdown], default=UNKNOWN)
    return replace(worst, state=told.state, detail=told.detail)


def _sysfs_flags(sys_root: Path) -> FirmwareReading:
    """Return the flags in sysfs; `UNKNOWN` itself when there are none."""
    for path in sorted((sys_root / "devices" / "platform").glob("soc*/soc*:firmware/get_throttled")):
        try:
            return _flags(read_text(path), "get_throttled")
        except OSError as error:
            return _fault(error)
    return UNKNOWN


def _ask(program: Vcgencmd) -> FirmwareReading:
    try:
        return _flags(program.ask(), "vcgencmd")
    except OSError as error:
        return _fault(error)


def _flags(text: str, source: str) -> FirmwareReading:
    flags = parse_throttled(text)
    if flags is not None:
        return judge_flags(flags, source)
    return FirmwareReading(Slowdown.UNKNOWN, state=SensorState.ABSURD, detail=f"{source} says {text[:40]!r}")


def _fault(error: OSError) -> FirmwareReading:
    denied = isinstance(error, PermissionError)
    state = SensorState.NO_PERMISSION if denied else SensorState.MISSING
    return FirmwareReading(Slowdown.UNKNOWN, state=state, detail=str(error.strerror or error))


def _supply(sys_root: Path) -> FirmwareReading | None:
    """Return what the kernel's under-voltage monitor of a Raspberry Pi says; it knows nothing of heat."""
    for chip in find_chips(sys_root):
        if chip.name == "rpi_volt":
            try:
                alarm = read_text(chip.folder / "in0_lcrit_alarm")
            except OSError:
                return None
            return FirmwareReading(Slowdown.POWER, "rpi_volt") if alarm == "1" else None
    return None


def _coolers(sys_root: Path) -> FirmwareReading | None:
    """Return what the cooling devices that slow the CPU down say; None where there is none."""
    devices = [device for device in read_cooling(sys_root) if device.kind is Cooler.CPU]
    for device in devices:
        if device.state:
            return FirmwareReading(Slowdown.THERMAL, device.type)
    return FirmwareReading(Slowdown.NONE, devices[0].type) if devices else None
