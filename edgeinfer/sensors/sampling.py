"""Take one sample of everything the governor decides by, without ever waiting for a sensor.

Owns the readers and their threads. Judges nothing: that is the governor's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.sensors import firmware
from edgeinfer.sensors.cpu import BusyMeter, CpuClock, fastest_clock, usable_cpus
from edgeinfer.sensors.cpufreq import FrequencyPolicy, PolicyReader
from edgeinfer.sensors.firmware import FirmwareReader, FirmwareReading
from edgeinfer.sensors.meter import NO_POWER, PowerMeter, PowerReading
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
    """Of the fastest cluster."""
    policies: tuple[FrequencyPolicy, ...] = ()
    """The clocks of all clusters; empty without cpufreq, and while it does not answer."""
    power: PowerReading = NO_POWER


class BoardSensors:
    """The sensors of one board, under `sys_root` and `proc_root`. Loop thread only."""

    def __init__(
        self, sys_root: Path, proc_root: Path, zone_types: Sequence[str], *, clock: Clock, rails: Sequence[str] = ()
    ) -> None:
        """Start no thread yet; each begins with the first sample.

        Args:
            sys_root: `/sys`, or a tree like it.
            proc_root: `/proc`, or a tree like it.
            zone_types: Types of thermal zones, and `hwmon:` names, that tell the CPU's temperature.
            clock: Monotonic time.
            rails: Names of what measures the board's power, in order of preference.
        """
        self._sys_root = sys_root
        self._proc_root = proc_root
        self._clock = clock
        self._thermal = ThermalReader(sys_root, zone_types, clock=clock)
        self._busy = BusyMeter(proc_root)
        self._firmware: Probe[FirmwareReading] = ThreadProbe(
            "firmware", FirmwareReader(sys_root, proc_root, clock=clock).read
        )
        self._last_firmware = firmware.UNKNOWN
        self._cpufreq: Probe[tuple[FrequencyPolicy, ...]] = ThreadProbe("cpufreq", PolicyReader(sys_root).read)
        self._last_policies: tuple[FrequencyPolicy, ...] = ()
        self._power = PowerMeter(sys_root, rails, clock=clock)
        self._changes = ChangeLog()

    def read(self) -> BoardReading:
        """Return the board as it is now; takes a few milliseconds at most."""
        busy = self._busy.share()
        policies = self._read_policies()
        return BoardReading(
            thermal=self._thermal.read(busy),
            firmware=self._read_firmware(),
            busy_share=busy,
            cpus=usable_cpus(self._sys_root, self._proc_root),
            clock=fastest_clock(policies),
            policies=policies,
            power=self._power.read(),
        )

    def close(self) -> None:
        """End the sensors' threads."""
        self._thermal.close()
        self._firmware.close()
        self._cpufreq.close()
        self._power.close()

    def _read_policies(self) -> tuple[FrequencyPolicy, ...]:
        now_ns = self._clock.now_ns()
        answer = self._cpufreq.poll(now_ns)
        if isinstance(answer, Waiting):
            if now_ns - answer.since_ns >= _BLOCKED_NS:
                self._changes.note("cpufreq", SensorState.BLOCKED, "does not answer", now_ns)
                self._last_policies = ()
        elif isinstance(answer, OSError):
            self._last_policies = ()
        else:
            if answer:
                self._changes.note("cpufreq", SensorState.OK, ", ".join(item.name for item in answer), now_ns)
            self._last_policies = answer
        return self._last_policies

    def _read_firmware(self) -> FirmwareReading:
        now_ns = self._clock.now_ns()
        answer = self._firmware.poll(now_ns)
        if isinstance(answer, Waiting):
            if now_ns - answer.since_ns < _BLOCKED_NS:
                return self._last_firmware
            self._changes.note("firmware", SensorState.BLOCKED, "does not answer", now_ns)
            answer = firmware.UNKNOWN
        elif isinstance(answer, OSError):
            self._changes.note("firmware", SensorState.MISSING, str(answer), now_ns)
            answer = firmware.UNKNOWN
        elif answer.source or answer.state.fault:
            self._changes.note("firmware", answer.state, answer.detail or answer.source, now_ns)
        self._last_firmware = answer
        return answer
