"""Read the sensors once a period, step the policy, and publish what the board can bear.

Owns the thermal state and its history (seconds per level, peak, episodes). Decides nothing by itself: that is
`policy.step`. Obeying is left to the scheduler and the executors, the memory ceiling comes from whoever budgets it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from edgeinfer.artifact.board import Thermal
from edgeinfer.clock import NS_PER_MS, NS_PER_S, Clock, sleep_until
from edgeinfer.config import ThermalSection
from edgeinfer.governor.policy import Policy, PolicyState, celsius, step
from edgeinfer.limits import CLOCK_STEP, Limits, ThermalLevel
from edgeinfer.sensors.cpu import clock_share
from edgeinfer.sensors.firmware import Slowdown
from edgeinfer.sensors.sampling import BoardReading
from edgeinfer.sensors.state import SensorState

_log = logging.getLogger(__name__)

_CONFIRM_NS = 100 * NS_PER_MS
"""At the start the second sample is taken so soon: a service that restarts on a hot board must know at once."""
_BUSY_SHARE = 0.5
"""Of all CPUs: above it the clock that is seen is the one that there is for work."""


@dataclass(frozen=True, slots=True)
class GovernorSnapshot:
    """The thermal state and its history since the start."""

    enabled: bool
    """False: what follows is only reported, `Limits` hold nothing back."""
    temp_mc: int | None
    zone: str
    sensor_state: SensorState
    level: ThermalLevel
    duty_cycle: float
    """What the policy says; in force only when `enabled`."""
    seconds_by_level: dict[ThermalLevel, float]
    level_changes: int
    peak_mc: int | None
    throttle_episodes: int
    """How often holding back has begun."""
    slowdown: Slowdown
    """What the firmware is doing at this moment."""
    firmware_throttled_s: float
    """Seconds in which firmware or kernel slowed the board down because of heat."""
    power_throttled_s: float
    """Seconds in which it did so because of a weak supply."""
    clock_hz: int | None
    clock_cap_hz: int | None
    busy_share: float | None
    reason: str


class Governor:
    """The thermal loop of one board. Loop thread only."""

    def __init__(
        self,
        *,
        thermal: Thermal,
        config: ThermalSection,
        read: Callable[[], BoardReading],
        cpus: frozenset[int],
        memory_ceiling: Callable[[], int],
        clock: Clock,
        publish: Callable[[Limits], None],
    ) -> None:
        """Start at nominal; nothing is read or published before the first step.

        Args:
            thermal: The board's trips.
            config: The operator's overrides.
            read: Takes one sample, without waiting (`BoardSensors.read`).
            cpus: CPUs that workers may ever use.
            memory_ceiling: Tells the ceiling of the memory ledger now, in bytes.
            clock: Monotonic time.
            publish: Takes each new `Limits`; called in the loop thread when anything but the reason has changed.
        """
        self._policy = Policy.of(thermal)
        self._config = config
        self._read = read
        self._cpus = cpus
        self._memory_ceiling = memory_ceiling
        self._clock = clock
        self._publish = publish
        self._state = PolicyState()
        self._limits: Limits | None = None
        self._reading: BoardReading | None = None
        self._reason = "no sample yet"
        self._last_ns: int | None = None
        self._level_ns = dict.fromkeys(ThermalLevel, 0)
        self._firmware_ns = 0
        self._power_ns = 0
        self._changes = 0
        self._episodes = 0
        self._peak_mc: int | None = None
        self._trips_checked = False
        self._known = asyncio.Event()

    @property
    def limits(self) -> Limits:
        """The newest limits; before the first step, everything at nominal."""
        if self._limits is None:
            return Limits(ThermalLevel.NOMINAL, self._cpus, 1.0, self._memory_ceiling(), reason=self._reason)
        return self._limits

    async def until_known(self, *, timeout_ns: int) -> bool:
        """Wait until the limits rest on a confirmed temperature or a sensor's fault; False when none came in time."""
        try:
            async with asyncio.timeout(timeout_ns / NS_PER_S):
                await self._known.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Step once a period, for ever. A late step is not made up for."""
        due_ns = self._clock.now_ns()
        while True:
            self.step()
            period_ns: int = self._config.sample_period
            if self._unconfirmed:
                period_ns = min(period_ns, _CONFIRM_NS)
            due_ns = max(due_ns + period_ns, self._clock.now_ns())
            await sleep_until(due_ns, self._clock)

    @property
    def _unconfirmed(self) -> bool:
        thermal = self._reading.thermal if self._reading else None
        return thermal is not None and thermal.state is SensorState.UNCONFIRMED and thermal.temp_mc is None

    def step(self) -> Limits:
        """Take one sample, decide, and publish what has changed."""
        now_ns = self._clock.now_ns()
        reading = self._read()
        self._account(now_ns)
        was = self._state
        self._state, decision = step(self._policy, was, reading.thermal, now_ns)
        self._reading, self._reason = reading, decision.reason
        if reading.thermal.temp_mc is not None:
            self._peak_mc = max(self._peak_mc or reading.thermal.temp_mc, reading.thermal.temp_mc)
        self._note_change(was, reading)
        self._check_trips(reading)
        cpus = self._cpus & reading.cpus or reading.cpus
        if self._config.enabled:
            level, duty, reason = decision.level, decision.duty_cycle, decision.reason
        else:
            level, duty, reason = ThermalLevel.NOMINAL, 1.0, f"thermal.enabled is false; {decision.reason}"
        share = self._clock_share(reading)
        limits = Limits(level, cpus, duty, self._memory_ceiling(), clock_share=share, reason=reason)
        changed = self._limits is None or _substance(limits) != _substance(self._limits)
        if limits.throttled and not (self._limits is not None and self._limits.throttled):
            self._episodes += 1
        self._limits = limits
        if changed:
            self._publish(limits)
        if reading.thermal.state.fault or reading.thermal.temp_mc is not None:
            self._known.set()
        return limits

    def snapshot(self) -> GovernorSnapshot:
        """Return the state and the history up to now."""
        self._account(self._clock.now_ns())
        reading = self._reading
        return GovernorSnapshot(
            enabled=self._config.enabled,
            temp_mc=reading.thermal.temp_mc if reading else None,
            zone=reading.thermal.zone if reading else "",
            sensor_state=reading.thermal.state if reading else SensorState.UNCONFIRMED,
            level=self._state.level,
            duty_cycle=self._state.duty_cycle,
            seconds_by_level={level: ns / NS_PER_S for level, ns in self._level_ns.items()},
            level_changes=self._changes,
            peak_mc=self._peak_mc,
            throttle_episodes=self._episodes,
            slowdown=self._slowdown(reading),
            firmware_throttled_s=self._firmware_ns / NS_PER_S,
            power_throttled_s=self._power_ns / NS_PER_S,
            clock_hz=reading.clock.now_hz if reading else None,
            clock_cap_hz=reading.clock.cap_hz if reading else None,
            busy_share=reading.busy_share if reading else None,
            reason=self._reason,
        )

    def _account(self, now_ns: int) -> None:
        """Count the time since the last call for what held in it."""
        if self._last_ns is not None and self._reading is not None:
            elapsed_ns = now_ns - self._last_ns
            self._level_ns[self._state.level] += elapsed_ns
            slowdown = self._slowdown(self._reading)
            if slowdown is Slowdown.THERMAL:
                self._firmware_ns += elapsed_ns
            elif slowdown is Slowdown.POWER:
                self._power_ns += elapsed_ns
        self._last_ns = now_ns

    def _slowdown(self, reading: BoardReading | None) -> Slowdown:
        """Return what the firmware does; where it doesn't tell, the temperature at which it would act tells."""
        if reading is None:
            return Slowdown.UNKNOWN
        temp_mc = reading.thermal.temp_mc
        if reading.firmware.slowdown is Slowdown.UNKNOWN and temp_mc is not None:
            return Slowdown.THERMAL if temp_mc >= self._policy.firmware_trip_mc else Slowdown.UNKNOWN
        return reading.firmware.slowdown

    def _clock_share(self, reading: BoardReading) -> float:
        """Return at which share of the full clock work runs now, in steps."""
        held = self._slowdown(reading) in {Slowdown.THERMAL, Slowdown.POWER}
        working = held or (reading.busy_share or 0.0) >= _BUSY_SHARE
        share = clock_share(reading.clock, working=working)
        return max(1, round(share / CLOCK_STEP)) * CLOCK_STEP

    def _note_change(self, was: PolicyState, reading: BoardReading) -> None:
        now = self._state
        if now.level is was.level:
            return
        self._changes += 1
        _log.log(
            logging.WARNING if now.level > was.level else logging.INFO,
            "throttle level=%s was=%s duty=%.2f enabled=%s zone=%s temp_mc=%s reason=%r",
            now.level.name, was.level.name, now.duty_cycle, self._config.enabled,
            reading.thermal.zone or "-", reading.thermal.temp_mc, self._reason,
        )  # fmt: skip

    def _check_trips(self, reading: BoardReading) -> None:
        """Say once when the kernel would act earlier than the board file believes."""
        if self._trips_checked or reading.thermal.temp_mc is None:
            return
        self._trips_checked = True
        trips = [trip for zone in reading.thermal.zones if zone.type == reading.thermal.zone for trip in zone.trips]
        for trip in trips:
            if trip.kind != "active" and trip.temp_mc < self._policy.firmware_trip_mc:
                _log.warning(
                    "trip kernel=%s at=%s zone=%s board_firmware_trip=%s: the kernel acts earlier than the board file "
                    "says; lower thermal.firmware_trip_c and the trips below it",
                    trip.kind, celsius(trip.temp_mc), reading.thermal.zone, celsius(self._policy.firmware_trip_mc),
                )  # fmt: skip


def _substance(limits: Limits) -> tuple[ThermalLevel, frozenset[int], float, int, float]:
    """Return what obeying depends on; the reason is for people and changes with every sample."""
    return limits.level, limits.cpus, limits.duty_cycle, limits.memory_ceiling_bytes, limits.clock_share
