"""Tell whether firmware or kernel is slowing the board down at this moment, and why.

A Raspberry Pi says so in `get_throttled`; elsewhere a cooling device that caps the clock says it. Neither can be
answered for a board that has neither: then it is unknown, never "all is well".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from edgeinfer.sensors.probe import read_text

_FREQUENCY_COOLERS = re.compile(r"(thermal-)?cpufreq-|cpufreq|Processor|intel_powerclamp|idle", re.IGNORECASE)
"""Types of cooling devices that slow the CPU down. Fans are not among them."""

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
    """`get_throttled`, or the type of the cooling device; empty when unknown."""
    flags: ThrottleFlags | None = None
    """On a Raspberry Pi."""


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


def judge_flags(flags: ThrottleFlags) -> FirmwareReading:
    """Return what the flags mean for the clock at this moment.

    With under-voltage present the slow-down is the supply's, whatever the temperature: firmware caps for either, and
    says so with the same bits.
    """
    slowed = flags.throttled or flags.frequency_capped or flags.soft_limit
    if flags.under_voltage:
        return FirmwareReading(Slowdown.POWER, "get_throttled", flags)
    return FirmwareReading(Slowdown.THERMAL if slowed else Slowdown.NONE, "get_throttled", flags)


def read_firmware(sys_root: Path) -> FirmwareReading:
    """Ask the firmware, else the cooling devices. May block as long as the firmware does: not for the loop thread.

    Raises:
        OSError: there is a source, but it answers with an error.
    """
    for path in sorted((sys_root / "devices" / "platform").glob("soc*/soc*:firmware/get_throttled")):
        flags = parse_throttled(read_text(path))
        return judge_flags(flags) if flags is not None else UNKNOWN
    reading = UNKNOWN
    for folder in sorted((sys_root / "class" / "thermal").glob("cooling_device*")):
        try:
            kind, state = read_text(folder / "type"), read_text(folder / "cur_state")
        except OSError:
            continue  # one that is going away; the others still tell
        if _FREQUENCY_COOLERS.match(kind) and state.isdigit():
            if int(state):
                return FirmwareReading(Slowdown.THERMAL, kind)
            reading = FirmwareReading(Slowdown.NONE, kind)
    return reading
