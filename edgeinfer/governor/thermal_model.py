"""Learn, from temperature and load alone, how fast and how far a board heats up: pure.

The model is first order. `rise` is by how much full load heats the board for good, `idle` where it would settle without
any load in the present air, and the load acts through a low-pass filter with the board's time constant:

    temperature = idle + rise * filtered load,   load = share of all CPUs' time that was used * share of the full clock

A handful of time constants are tried side by side. For each, recursive least squares (as a Kalman filter, so that what
is forgotten is bounded) follows `idle` and `rise`: `idle` may wander, because air and sun do, `rise` hardly. The one
with the smallest errors while the load moved is believed. Fitting values rather than their changes means that a sensor
which counts in whole degrees biases nothing.

Owns no decision: what a forecast is good for is `policy`. While the model isn't trusted there is no forecast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from edgeinfer.clock import NS_PER_S

TIME_CONSTANTS_S = tuple(4.0 * 1.6**index for index in range(11))
"""4 s (a bare die) to 440 s (a heavy closed case); between two of them an error of a quarter is harmless."""

_NOISE_C2 = 0.36
"""Variance that a reading is taken to have: flicker, whole degrees, and what first order leaves out."""
_IDLE_DRIFT_C2_PER_S = 4e-4
"""So `idle` follows the air within about half a minute, up to 2 C a minute, and no load's heat."""
_RISE_DRIFT_C2_PER_S = 2e-4
_IDLE_SPREAD_C2, _RISE_SPREAD_C2 = 400.0, 200.0
"""What is known before anything was seen, and the most that can ever be forgotten."""
Matrix = tuple[float, float, float, float, float, float]
"""Covariance of idle, rise and rest, upper triangle by rows."""
_UNKNOWN: Matrix = (_IDLE_SPREAD_C2, 0.0, 0.0, _RISE_SPREAD_C2, 0.0, 25.0)
_RISE_C = 35.0
_RISE_BOUNDS_C = (3.0, 120.0)
"""A board that full load heats by less needs no forecast; nothing without a fault heats by more."""
_IDLE_BOUNDS_C = (-40.0, 110.0)

_SCORE_S = 60.0
_SWITCH = 0.9
"""Another time constant must be so much better."""
_ERROR_S = 20.0
_TRUST_RMS_C, _DISTRUST_RMS_C = 0.8, 1.2
_TRUST_BIAS_C, _DISTRUST_BIAS_C = 0.4, 0.8
_TRUST_SPREAD, _DISTRUST_SPREAD = 0.2, 0.3
"""Standard deviation of `rise`, as a share of it."""
_TRUST_AFTER_S = 60.0
_PROVE_S, _PROVE_AGAIN, _PROVE_MOST_S = 20.0, 3.0, 1800.0
"""How long everything must have been good before the model is trusted; it is distrusted at once.

Each loss makes the next proof three times as long, so that a board that first order doesn't describe isn't steered by
turns; half an hour of trust makes good for it.
"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one time constant makes of everything seen so far."""

    tau_s: float
    load: float
    """The load, filtered with `tau_s`."""
    idle_c: float
    rise_c: float
    rest_c: float = 0.0
    """Heat that was there before the first sample and that no load since then explains: it fades with `tau_s`."""
    fade: float = 1.0
    """How much of it is left."""
    spreads: Matrix = _UNKNOWN
    score_c2: float = 1.0
    """Mean squared error of its predictions while the load moved."""
    error_c: float = 0.0
    """Mean error of late."""
    error_c2: float = 4.0
    """Mean squared error of late."""

    @property
    def spread(self) -> float:
        """How uncertain `rise_c` is, as a share of it."""
        return math.sqrt(self.spreads[3]) / self.rise_c


@dataclass(frozen=True, slots=True)
class ThermalModel:
    """Everything learnt so far; every observation makes a new one."""

    candidates: tuple[Candidate, ...] = ()
    best: int = 0
    seen_s: float = 0.0
    good_s: float = 0.0
    """For how long, without a break, the errors have been small enough."""
    prove_s: float = _PROVE_S
    """How long they must be, to be trusted again."""
    trusted: bool = False
    at_ns: int | None = None

    @property
    def confidence(self) -> float:
        """0 (knows nothing) to 1: how well `rise` is known and how small the errors are; for reports."""
        if not self.candidates:
            return 0.0
        best = self.candidates[self.best]
        known = 1 - min(1.0, best.spread / _DISTRUST_SPREAD)
        right = 1 - min(1.0, math.sqrt(best.error_c2) / _DISTRUST_RMS_C)
        return math.sqrt(known * right)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a trusted model says of the board at this moment."""

    idle_c: float
    """Where it would settle without any load."""
    rise_c: float
    """By how much more at full load."""
    tau_s: float
    load: float
    """The filtered load that it is heated by now, 0 to 1."""

    def settles_c(self, load: float) -> float:
        """Return where the temperature would settle at a constant load."""
        return self.idle_c + self.rise_c * load

    def sustainable(self, target_c: float) -> float:
        """Return the load, 0 to 1, at which the board would settle at `target_c`."""
        return min(1.0, max(0.0, (target_c - self.idle_c) / self.rise_c))

    def steering(self, temp_c: float, target_c: float, within_s: float) -> float:
        """Return the constant load that leads from `temp_c` to `target_c` in `within_s`; below 0 or above 1: none."""
        left = math.exp(-within_s / self.tau_s)
        return ((target_c - temp_c * left) / (1 - left) - self.idle_c) / self.rise_c

    def time_to_s(self, temp_c: float, target_c: float, load: float) -> float | None:
        """Return in how many seconds `target_c` is reached at a constant load; None when it never is."""
        if temp_c >= target_c:
            return 0.0
        settles_c = self.settles_c(load)
        if settles_c <= target_c:
            return None
        return self.tau_s * math.log((settles_c - temp_c) / (settles_c - target_c))


def observe(model: ThermalModel, temp_mc: int | None, load: float | None, now_ns: int) -> ThermalModel:
    """Return the model after another sample.

    Args:
        model: What is known so far.
        temp_mc: The newest believed temperature; None in a fault: then only the load counts.
        load: Mean load since the sample before, 0 to 1; None when it is unknown: what is known is kept, not trusted.
        now_ns: Monotonic time of the sample.
    """
    if load is None or not 0 <= load <= 1:
        return replace(model, at_ns=now_ns, trusted=False, good_s=0.0)
    if not model.candidates:
        if temp_mc is None:
            return model
        temp_c = temp_mc / 1000
        idle_c = _within(temp_c - _RISE_C * load, _IDLE_BOUNDS_C)
        start = (Candidate(tau_s, load, idle_c, _RISE_C) for tau_s in TIME_CONSTANTS_S)
        return ThermalModel(tuple(start), len(TIME_CONSTANTS_S) // 2, at_ns=now_ns)
    dt_s = 0.0 if model.at_ns is None else (now_ns - model.at_ns) / NS_PER_S
    if dt_s <= 0:
        return model
    moved = abs(load - model.candidates[model.best].load)
    candidates = tuple(_learn(item, temp_mc, load, moved, dt_s) for item in model.candidates)
    best = min(range(len(candidates)), key=lambda index: candidates[index].score_c2)
    if candidates[best].score_c2 > _SWITCH * candidates[model.best].score_c2:
        best = model.best
    return _judge(replace(model, candidates=candidates, best=best, seen_s=model.seen_s + dt_s, at_ns=now_ns), dt_s)


def forecast(model: ThermalModel) -> Forecast | None:
    """Return what the model says; None while it isn't trusted."""
    if not model.trusted:
        return None
    best = model.candidates[model.best]
    return Forecast(best.idle_c, best.rise_c, best.tau_s, best.load)


def _learn(was: Candidate, temp_mc: int | None, load: float, moved: float, dt_s: float) -> Candidate:
    left = math.exp(-dt_s / was.tau_s)
    filtered, fade = load + (was.load - load) * left, was.fade * left
    ii, ir, ix, rr, rx, xx = was.spreads
    ii = min(_IDLE_SPREAD_C2, ii + _IDLE_DRIFT_C2_PER_S * dt_s)
    rr = min(_RISE_SPREAD_C2, rr + _RISE_DRIFT_C2_PER_S * dt_s)
    if temp_mc is None:
        return replace(was, load=filtered, fade=fade, spreads=(ii, ir, ix, rr, rx, xx))
    error_c = temp_mc / 1000 - was.idle_c - was.rise_c * filtered - was.rest_c * fade
    idle, rise, rest = (  # covariance of each with what was seen
        ii + ir * filtered + ix * fade,
        ir + rr * filtered + rx * fade,
        ix + rx * filtered + xx * fade,
    )
    total = idle + rise * filtered + rest * fade + _NOISE_C2
    recent, scored = min(1.0, dt_s / _ERROR_S), min(1.0, moved * dt_s / _SCORE_S)
    return Candidate(
        tau_s=was.tau_s,
        load=filtered,
        idle_c=_within(was.idle_c + idle / total * error_c, _IDLE_BOUNDS_C),
        rise_c=_within(was.rise_c + rise / total * error_c, _RISE_BOUNDS_C),
        rest_c=was.rest_c + rest / total * error_c,
        fade=fade,
        spreads=(
            max(0.0, ii - idle * idle / total),
            ir - idle * rise / total,
            ix - idle * rest / total,
            max(0.0, rr - rise * rise / total),
            rx - rise * rest / total,
            max(0.0, xx - rest * rest / total),
        ),
        score_c2=was.score_c2 + scored * (error_c**2 - was.score_c2),
        error_c=was.error_c + recent * (error_c - was.error_c),
        error_c2=was.error_c2 + recent * (error_c**2 - was.error_c2),
    )


def _judge(model: ThermalModel, dt_s: float) -> ThermalModel:
    """Say whether the model is trusted now: slowly won, lost at once, and not by the same errors."""
    best = model.candidates[model.best]
    rms_c, bias_c = math.sqrt(best.error_c2), abs(best.error_c)
    bounded = _RISE_BOUNDS_C[0] < best.rise_c < _RISE_BOUNDS_C[1]
    bad = rms_c > _DISTRUST_RMS_C or bias_c > _DISTRUST_BIAS_C or best.spread > _DISTRUST_SPREAD or not bounded
    good = rms_c < _TRUST_RMS_C and bias_c < _TRUST_BIAS_C and best.spread < _TRUST_SPREAD and bounded
    good_s = model.good_s + dt_s if good else 0.0
    won = good_s >= model.prove_s and model.seen_s >= max(_TRUST_AFTER_S, best.tau_s / 2)
    trusted, prove_s = not bad and (model.trusted or won), model.prove_s
    if model.trusted and not trusted:
        prove_s = min(_PROVE_MOST_S, prove_s * _PROVE_AGAIN)
    elif trusted and good_s >= _PROVE_MOST_S:
        prove_s = _PROVE_S
    return replace(model, good_s=good_s, trusted=trusted, prove_s=prove_s)


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(bounds[1], max(bounds[0], value))
