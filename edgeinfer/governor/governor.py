"""Read the sensors once a period, step the policy, and publish what the board can bear.

Owns the thermal state, the thermal model and their history (seconds per level, peak, episodes). Decides nothing by
itself: that is `policy.step`. Obeying is left to the scheduler and the executors, the memory ceiling comes from
whoever budgets it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from edgeinfer.artifact.board import Thermal
from edgeinfer.clock import NS_PER_MS, NS_PER_S, Clock, sleep_until
from edgeinfer.config import ThermalSection
from edgeinfer.governor.attribution import Cause, Shares, cause
from edgeinfer.governor.frequency_cap import CapState, FrequencyCap, duty_under_cap, split
from edgeinfer.governor.kernel_trips import fitted
from edgeinfer.governor.policy import Decision, Policy, PolicyState, celsius, step
from edgeinfer.governor.thermal_model import Forecast, ThermalModel, forecast, observe
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
class Outlook:
    """What the thermal model says, for reports and planning."""

    confidence: float
    """0 to 1."""
    trusted: bool
    """False: the trips alone decide, and the rest is None."""
    idle_c: float | None = None
    """Where the board would settle without any load, in the present air."""
    rise_c: float | None = None
    """By how much full load on all CPUs heats it."""
    tau_s: float | None = None
    sustainable: float | None = None
    """The load of the whole machine, 0 to 1, at which it stays at the policy's target."""
    next_trip_s: float | None = None
    """When the next trip is reached at the present load; None: never."""


BLIND = Outlook(0.0, trusted=False)


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
    throttled_by: dict[Cause, float] = field(default_factory=dict)
    """Seconds in which firmware or kernel slowed the board down, by cause."""
    outlook: Outlook = BLIND


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
        own_load: Callable[[], float | None] = lambda: None,
        cap: FrequencyCap | None = None,
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
            own_load: Tells our processes' share of all CPUs' time since it was asked last; None: unknown.
            cap: Writes frequency caps; None: the duty cycle alone holds work back.
        """
        self._policy = Policy.of(thermal)
        self._fit = thermal.trips_from_kernel
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
        self._own_load = own_load
        self._cap = cap
        self._cap_state = CapState()
        self._model = ThermalModel()
        self._shares = Shares()
        self._cause_ns = dict.fromkeys(Cause, 0)
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
        elapsed_ns = self._account(now_ns)
        self._check_trips(reading)
        was = self._state
        self._learn(reading, now_ns, elapsed_ns)
        self._state, decision = step(
            self._policy, was, reading.thermal, now_ns,
            forecast=forecast(self._model), others=self._shares.whole - self._shares.ours,
        )  # fmt: skip
        self._reading, self._reason = reading, decision.reason
        if reading.thermal.temp_mc is not None:
            self._peak_mc = max(self._peak_mc or reading.thermal.temp_mc, reading.thermal.temp_mc)
        self._note_change(was, reading)
        limits = self._make_limits(reading, decision, now_ns)
        changed = self._limits is None or _substance(limits) != _substance(self._limits)
        if limits.throttled and not (self._limits is not None and self._limits.throttled):
            self._episodes += 1
        self._limits = limits
        if changed:
            self._publish(limits)
        if reading.thermal.state.fault or reading.thermal.temp_mc is not None:
            self._known.set()
        return limits

    def close(self) -> None:
        """Give the clock back."""
        if self._cap is not None:
            self._cap.close()

    def _learn(self, reading: BoardReading, now_ns: int, elapsed_ns: int) -> None:
        own, busy, share = self._own_load(), reading.busy_share, self._clock_share(reading)
        whole = None if busy is None else busy * share
        self._shares = self._shares.after(None if own is None else own * share, whole, elapsed_ns / NS_PER_S)
        temp_mc = None if reading.thermal.state.fault else reading.thermal.temp_mc
        self._model = observe(self._model, temp_mc, whole, now_ns)

    def _make_limits(self, reading: BoardReading, decision: Decision, now_ns: int) -> Limits:
        cpus = self._cpus & reading.cpus or reading.cpus
        if self._config.enabled:
            level, duty, reason = decision.level, decision.duty_cycle, decision.reason
        else:
            level, duty, reason = ThermalLevel.NOMINAL, 1.0, f"thermal.enabled is false; {decision.reason}"
        cap_hz = None
        if self._cap is not None:
            asked = self._cap_state.share  # what is in force by now
            self._cap_state = split(duty, self._cap_state, now_ns)
            cap_hz = self._cap.ask(self._cap_state.share, reading.policies, now_ns)
            duty = duty_under_cap(duty, asked, reading.policies)
        share = self._clock_share(reading)
        return Limits(level, cpus, duty, self._memory_ceiling(), max_freq_hz=cap_hz, clock_share=share, reason=reason)

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
            throttled_by={which: ns / NS_PER_S for which, ns in self._cause_ns.items()},
            outlook=self._outlook(reading),
        )

    def _outlook(self, reading: BoardReading | None) -> Outlook:
        said, confidence = forecast(self._model), self._model.confidence
        if said is None or reading is None or reading.thermal.temp_mc is None:
            return Outlook(confidence, trusted=False)
        temp_mc, target_mc = reading.thermal.temp_mc, self._policy.target_mc
        next_mc = min((trip.trip_mc for trip in self._policy.trips if trip.trip_mc > temp_mc), default=None)
        return Outlook(
            confidence,
            trusted=True,
            idle_c=said.idle_c,
            rise_c=said.rise_c,
            tau_s=said.tau_s,
            sustainable=None if target_mc is None else said.sustainable(target_mc / 1000),
            next_trip_s=_next_trip_s(said, temp_mc, next_mc, self._shares.whole),
        )

    def _account(self, now_ns: int) -> int:
        """Count the time since the last call for what held in it, and return it."""
        elapsed_ns = 0
        if self._last_ns is not None and self._reading is not None:
            elapsed_ns = now_ns - self._last_ns
            self._level_ns[self._state.level] += elapsed_ns
            slowdown = self._slowdown(self._reading)
            found = cause(slowdown, forecast(self._model), self._shares, self._policy.firmware_trip_mc / 1000)
            if found is not None:
                self._cause_ns[found] += elapsed_ns
            if slowdown is Slowdown.THERMAL:
                self._firmware_ns += elapsed_ns
            elif slowdown is Slowdown.POWER:
                self._power_ns += elapsed_ns
        self._last_ns = now_ns
        return elapsed_ns

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
        """Fit the trips to the kernel's where the board file says so; else say once when the kernel acts earlier."""
        if self._trips_checked or reading.thermal.temp_mc is None:
            return
        self._trips_checked = True
        trips = [trip for zone in reading.thermal.zones if zone.type == reading.thermal.zone for trip in zone.trips]
        if self._fit:
            stated_mc, self._policy = self._policy.firmware_trip_mc, fitted(self._policy, trips)
            if self._policy.firmware_trip_mc != stated_mc:
                _log.info(
                    "trip kernel=%s zone=%s board_firmware_trip=%s: all trips move with the kernel's",
                    celsius(self._policy.firmware_trip_mc), reading.thermal.zone, celsius(stated_mc),
                )  # fmt: skip
        for trip in trips:
            if trip.kind != "active" and trip.temp_mc < self._policy.firmware_trip_mc:
                _log.warning(
                    "trip kernel=%s at=%s zone=%s board_firmware_trip=%s: the kernel acts earlier than the board file "
                    "says; lower thermal.firmware_trip_c and the trips below it",
                    trip.kind, celsius(trip.temp_mc), reading.thermal.zone, celsius(self._policy.firmware_trip_mc),
                )  # fmt: skip


def _next_trip_s(said: Forecast, temp_mc: int, next_mc: int | None, load: float) -> float | None:
    return None if next_mc is None else said.time_to_s(temp_mc / 1000, next_mc / 1000, load)


def _substance(limits: Limits) -> Limits:
    """Return what obeying depends on; the reason is for people and changes with every sample."""
    return replace(limits, reason="")
