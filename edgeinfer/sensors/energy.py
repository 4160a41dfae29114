"""Turn samples of power, or of an energy counter, into joules for each interval: pure.

What a board used while nobody looked is unknown, never guessed: after a gap, a fault, a counter that was set back or
one that says what cannot be, that interval has no joules and the next one starts anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.clock import NS_PER_S
from edgeinfer.sensors.power import PowerSample

_LONGEST_NS = 10 * NS_PER_S
"""A rail's power is taken to be a straight line between two samples up to this far apart; a counter needs no such."""
_MOST_W = 2_000
"""No board draws more: a counter that says so was set back, or jumped."""
_UJ_PER_J = 1_000_000


@dataclass(frozen=True, slots=True)
class EnergyState:
    """The sample before, and the sum so far."""

    at_ns: int | None = None
    """None before the first sample and after a fault."""
    sample: PowerSample | None = None
    total_j: float = 0.0
    """Joules of all intervals that are known."""
    known_s: float = 0.0
    """How long those intervals are together."""


@dataclass(frozen=True, slots=True)
class EnergyInterval:
    """What was used from the sample before to this one."""

    seconds: float
    joules: float


def add_sample(
    state: EnergyState, sample: PowerSample | None, now_ns: int, range_uj: int = 0
) -> tuple[EnergyState, EnergyInterval | None]:
    """Return the state after `sample` (None: a fault) and the interval that it ends, None when that is unknown.

    Args:
        state: Before.
        sample: What the source says now.
        now_ns: When.
        range_uj: Where an energy counter starts from 0 again; 0: unknown, then one that fell tells nothing.
    """
    if sample is None:
        return EnergyState(None, None, state.total_j, state.known_s), None
    joules = None
    if state.at_ns is not None and state.sample is not None and now_ns > state.at_ns:
        joules = _joules(state.sample, sample, now_ns - state.at_ns, range_uj)
    if joules is None:
        return EnergyState(now_ns, sample, state.total_j, state.known_s), None
    assert state.at_ns is not None
    seconds = (now_ns - state.at_ns) / NS_PER_S
    after = EnergyState(now_ns, sample, state.total_j + joules, state.known_s + seconds)
    return after, EnergyInterval(seconds, joules)


def _joules(before: PowerSample, after: PowerSample, elapsed_ns: int, range_uj: int) -> float | None:
    seconds = elapsed_ns / NS_PER_S
    if before.power_mw is not None and after.power_mw is not None:
        return None if elapsed_ns > _LONGEST_NS else (before.power_mw + after.power_mw) / 2000 * seconds
    if before.energy_uj is None or after.energy_uj is None:
        return None
    used_uj = after.energy_uj - before.energy_uj
    if used_uj < 0 and range_uj >= before.energy_uj:
        used_uj += range_uj + 1  # it counts from 0 to range_uj
    joules = used_uj / _UJ_PER_J
    return joules if 0 <= joules <= _MOST_W * seconds else None
