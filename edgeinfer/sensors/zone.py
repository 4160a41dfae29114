"""Decide which of a thermal zone's samples to believe: pure, one sample at a time.

Boards lie in known ways: one bogus sample between good ones, placeholders, a driver that errs once, a register that no
longer changes. So a sample is acted upon only if it is plausible and either close to the last good one or confirmed by
the next, a colder one by the next three; a fault too counts only when it is seen twice in a row. Until then the last
good value stands. To believe a hot board cool is what costs a board, so a fall that no board could make is a fault.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from edgeinfer.clock import NS_PER_S
from edgeinfer.sensors.state import SensorState

LOWEST_MC = -40_000
HIGHEST_MC = 125_000
"""The range of industrial parts. Outside of it a driver shows garbage (-273150, -650788984) or the board is on fire."""
JUMP_MC = 10_000
"""More than this between two samples needs a second opinion: dies warm by a few degrees a second under full load."""
_PATIENCE = 4
"""So many samples in a row that cannot be believed, and the zone counts as absurd."""
_FAULTS = 2
"""So many faults in a row, and it counts as faulty: drivers err once now and then."""
_REMEMBERED = 3
"""Without a confirmed temperature, a sample is confirmed by any of so many before it; a fall, by all of them."""

FALL_MC = 30_000
"""What a die may lose at once, when its load ends: its lead over the board. 15 W, the most of the boards in
`device-configs/`, at an assumed 2 C/W from junction to board: an engineering bound, not a measurement."""
COOLING_MC_PER_S = 3_000
"""What it may lose each second beyond that, with the board. The quickest in `device-configs/` (time constant 12 s)
falls from 97 C by 35 C in its first 8 s, 11 C more than 8 s of this; a Raspberry Pi (150 s) by 0.5 C/s at most."""
STOOD_NS = 600 * NS_PER_S
"""A value that was reached by an impossible fall is believed after standing so long: four time constants of a Pi. By
then a sensor that is stuck is known to be `frozen`."""

_STILL_SWING_NS = 120 * NS_PER_S
_STILL_SWING_SHARE = 0.4
"""No die keeps its last digit for two minutes while two fifths of all cores start or stop working."""
_STILL_BUSY_NS = 600 * NS_PER_S
_STILL_BUSY_SHARE = 0.5
"""Nor for ten minutes at half load. At idle, sensors that count in whole degrees do stand still."""
_SMOOTH_NS = 10 * NS_PER_S
"""Time constant of the smoothed load: silicon feels a load that lasts that long by several degrees."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What came instead of a temperature."""

    state: SensorState
    detail: str


@dataclass(frozen=True, slots=True)
class Fall:
    """Where an impossible fall has led, and for how long it has stood there."""

    to_mc: int
    stood_ns: int


@dataclass(frozen=True, slots=True)
class Belief:
    """What is believed of a zone after the samples so far."""

    state: SensorState = SensorState.UNCONFIRMED
    temp_mc: int | None = None
    """The last confirmed temperature; None in a fault, and until the first one is confirmed."""
    detail: str = "no sample yet"
    doubted_mc: tuple[int, ...] = ()
    """The newest samples that were plausible but not believed, oldest first."""
    doubts: int = 0
    """Samples in a row that were not believed."""
    faults: int = 0
    """Of these, faults in a row."""
    floor_mc: int | None = None
    """The coldest that it can be by now, after how hot it was; outlives faults."""
    fall: Fall | None = None
    """While its samples are below that."""


def parse_temp(text: str) -> int | Fault:
    """Return the millidegrees that a `temp` attribute says, or what is wrong with it."""
    try:
        value = int(text)
    except ValueError:
        return Fault(SensorState.ABSURD, f"{text[:40]!r} is not a number")
    if not LOWEST_MC <= value <= HIGHEST_MC:
        return Fault(SensorState.ABSURD, f"{value} is not between {LOWEST_MC} and {HIGHEST_MC} millidegrees")
    return value


def observe(belief: Belief, sample: int | Fault, elapsed_ns: int = NS_PER_S) -> Belief:
    """Return what to believe after `sample` (millidegrees, or a fault), `elapsed_ns` after the one before."""
    floor_mc, fall = belief.floor_mc, belief.fall
    if floor_mc is not None:
        floor_mc -= COOLING_MC_PER_S * elapsed_ns // NS_PER_S
    if isinstance(sample, int):  # of what came before an impossible one, nothing is confirmed
        fall = _fallen(fall, floor_mc, sample, elapsed_ns)
        if fall is not None and fall.stood_ns >= STOOD_NS and sample != 0:
            return Belief(SensorState.OK, sample, "", floor_mc=sample - FALL_MC)
        if fall is not None:
            seconds = STOOD_NS // NS_PER_S
            detail = f"{sample} is a fall that no board could make; believed once it has stood for {seconds} s"
            sample, belief = Fault(SensorState.ABSURD, detail), replace(belief, doubted_mc=())
        elif sample == 0 and (belief.temp_mc is None or belief.temp_mc > JUMP_MC):
            sample = Fault(SensorState.ABSURD, "exactly 0, which is what a zone without a sensor says")
    after = _weigh(belief, sample)
    if after.temp_mc is not None:
        lowest_mc = after.temp_mc - FALL_MC
        floor_mc = lowest_mc if floor_mc is None else max(lowest_mc, floor_mc)
    return replace(after, floor_mc=floor_mc, fall=fall)


def _fallen(fall: Fall | None, floor_mc: int | None, sample: int, elapsed_ns: int) -> Fall | None:
    """Return the fall that `sample` is part of; None when it is one that a board could make."""
    if fall is not None and abs(sample - fall.to_mc) <= JUMP_MC:
        return Fall(fall.to_mc, fall.stood_ns + elapsed_ns)
    return None if floor_mc is None or sample >= floor_mc else Fall(sample, 0)


def _weigh(belief: Belief, sample: int | Fault) -> Belief:
    """Return what to believe after a sample that is possible, or a fault."""
    doubts = belief.doubts + 1
    if isinstance(sample, Fault):
        faults = belief.faults + 1
        if faults >= _FAULTS or doubts >= _PATIENCE or sample.state is SensorState.BLOCKED:
            return Belief(sample.state, None, sample.detail, (), doubts, faults)
        state = belief.state if belief.state.fault else SensorState.UNCONFIRMED
        return replace(belief, state=state, detail=sample.detail, doubts=doubts, faults=faults)
    good, doubted = belief.temp_mc, (*belief.doubted_mc, sample)[-_REMEMBERED:]
    if good is None:
        if any(abs(sample - earlier) <= JUMP_MC for earlier in belief.doubted_mc):
            return Belief(SensorState.OK, sample, "")
        state = belief.state if belief.state.fault else _in_doubt(doubts)
        return Belief(state, None, f"{sample} is not confirmed yet", doubted, doubts)
    if abs(sample - good) <= JUMP_MC:
        return Belief(SensorState.OK, sample, "")
    # All say that it is at least so much hotter (or colder); believe the one that claims least.
    if sample > good and belief.doubted_mc and belief.doubted_mc[-1] > good:
        return Belief(SensorState.OK, min(sample, belief.doubted_mc[-1]), "")
    if sample < good and len(belief.doubted_mc) == _REMEMBERED and max(belief.doubted_mc) < good:
        return Belief(SensorState.OK, max(sample, *belief.doubted_mc), "")
    state = _in_doubt(doubts)
    detail = f"{sample} after {good}, not confirmed yet"
    return Belief(state, None if state.fault else good, detail, doubted, doubts)


def _in_doubt(doubts: int) -> SensorState:
    return SensorState.ABSURD if doubts >= _PATIENCE else SensorState.UNCONFIRMED


@dataclass(frozen=True, slots=True)
class Stillness:
    """How long a zone has said the same, and what the load did in that time."""

    raw_mc: int
    since_ns: int
    seen_ns: int
    busy: float | None
    """Share of all cores that is busy, smoothed; None when the load is unknown."""
    busy_low: float
    busy_high: float


def watch(still: Stillness | None, raw_mc: int, busy: float | None, now_ns: int) -> Stillness:
    """Return the stillness after one more sample; `busy` is the load now, 0 to 1."""
    if still is None or busy is None or still.busy is None:
        smooth = busy
    else:
        weight = 1 - math.exp(-(now_ns - still.seen_ns) / _SMOOTH_NS)
        smooth = still.busy + weight * (busy - still.busy)
    level = 0.0 if smooth is None else smooth
    if still is None or raw_mc != still.raw_mc:
        return Stillness(raw_mc, now_ns, now_ns, smooth, level, level)
    low, high = min(still.busy_low, level), max(still.busy_high, level)
    return Stillness(raw_mc, still.since_ns, now_ns, smooth, low, high)


def frozen(still: Stillness) -> bool:
    """Return whether the zone has stood still for longer than a sensor that measures could."""
    still_ns = still.seen_ns - still.since_ns
    if still_ns >= _STILL_SWING_NS and still.busy_high - still.busy_low >= _STILL_SWING_SHARE:
        return True
    return still_ns >= _STILL_BUSY_NS and still.busy_low >= _STILL_BUSY_SHARE
