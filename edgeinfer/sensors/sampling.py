"""Take one sample of everything the governor decides by, without ever waiting for a sensor.

Owns the readers and their threads. Judges nothing: that is the governor's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.sensors import firmware
from edgeinfer.sensors.cpu import BusyMeter, CpuClock, cpu_clock, usable_cpus
from edgeinfer.sensors.firmware import FirmwareReading
from edgeinfer.sensors.probe import Probe, ThreadProbe, Waiting
from edgeinfer.sensors.state import ChangeLog, SensorState
from edgeinfer.sensors.thermal import ThermalReader, ThermalReading

_BLOCKED_NS = 2 * NS_PER_S


@dataclass(frozen=True, slots=True)
class BoardReading:
    """The board at one moment."""

    thermal: ThermalReading
    firmware: FirmwareReading
    busy_share: float | None
    """Share of all CPUs that worked since the sample before, 0 to 1."""
    cpus: frozenset[int]
    """CPUs that this process may use now: cores go offline and come back."""
    clock: CpuClock


_NO_CLOCK = CpuClock(None, None, None, "")


class BoardSensors:
    """The sensors of one board, under `sys_root` and `proc_root`. Loop thread only."""

    def __init__(self, sys_root: Path, proc_root: Path, zone_types: Sequence[str], *, clock: Clock) -> None:
        self._sys_root = sys_root
        self._proc_root = proc_root
        self._clock = clock
        self._thermal = ThermalReader(sys_root, zone_types, clock=clock)
        self._busy = BusyMeter(proc_root)
        self._firmware: Probe[FirmwareReading] = ThreadProbe("firmware", lambda: firmware.read_firmware(sys_root))
        self._last_firmware = firmware.UNKNOWN
        self._cpufreq: Probe[CpuClock] = ThreadProbe("cpufreq", lambda: cpu_clock(sys_root))
        self._last_clock = _NO_CLOCK
        self._changes = ChangeLog()

    def read(self) -> BoardReading:
        """Return the board as it is now; takes a few milliseconds at most."""
        busy = self._busy.share()
        return BoardReading(
            thermal=self._thermal.read(busy),
            firmware=self._read_firmware(),
            busy_share=busy,
            cpus=usable_cpus(self._sys_root, self._proc_root),
            clock=self._read_clock(),
        )

    def close(self) -> None:
        """End the sensors' threads."""
        self._thermal.close()
        self._firmware.close()
        self._cpufreq.close()

    def _read_clock(self) -> CpuClock:
        now_ns = self._clock.now_ns()
        answer = self._cpufreq.poll(now_ns)
        if isinstance(answer, CpuClock):
            self._last_clock = answer
        elif isinstance(answer, OSError) or now_ns - answer.since_ns >= _BLOCKED_NS:
            self._last_clock = _NO_CLOCK
        return self._last_clock

    def _read_firmware(self) -> FirmwareReading:
        now_ns = self._clock.now_ns()
        answer = self._firmware.poll(now_ns)
        if isinstance(answer, Waiting):
            if now_ns - answer.since_ns < _BLOCKED_NS:
                return self._last_firmware
            self._changes.note("firmware", SensorState.BLOCKED, "does not answer", now_ns)
            answer = firmware.UNKNOWN
        elif isinstance(answer, OSError):
            denied = isinstance(answer, PermissionError)
            state = SensorState.NO_PERMISSION if denied else SensorState.MISSING
            self._changes.note("firmware", state, str(answer), now_ns)
            answer = firmware.UNKNOWN
        elif answer.source:
            self._changes.note("firmware", SensorState.OK, answer.source, now_ns)
        self._last_firmware = answer
        return answer
