"""Decide what memory pressure means for the budget: judge the sensors, and lower the ceiling by a rule.

Pure. The kernel's figure of available memory counts the page cache as free, also that part which is in use all the
time: mapped weights, and everybody's programs. When dropping it hurts, refaults, major faults and PSI show it, and then
less memory may be reserved than is available. The table says from where on; the rule is:

1. A level that has held for `RISE_NS` is in force; it falls by one after the sensors have been below half of its
   thresholds for `FALL_NS`. So neither a burst nor a value near a threshold makes it flap.
2. From `SOME` on nothing more is reserved than is then: no model is loaded, no mapped weights are added.
3. At `HIGH` and `SEVERE` the ceiling goes on falling, so that idle models are evicted, down to half of what was
   reserved when it began: a sensor alone empties no device.
4. At `NONE` it recovers by `RECOVER_PER_S` of the whole each second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from edgeinfer.clock import NS_PER_S
from edgeinfer.sensors.pressure import PressureSample

RISE_NS: Final = 3 * NS_PER_S
FALL_NS: Final = 10 * NS_PER_S
RECOVER_PER_S: Final = 0.02
_LONGEST_STEP_NS: Final = 2 * NS_PER_S
"""A loop that was held up counts for no more than this."""


class Pressure(IntEnum):
    """How much work suffers from want of memory."""

    NONE = 0
    SOME = 1
    """Nothing more is taken."""
    HIGH = 2
    """Idle models go, slowly."""
    SEVERE = 3
    """Idle models go."""


THRESHOLDS: Final[dict[str, tuple[float, float, float]]] = {
    # sensor          SOME    HIGH     SEVERE
    "refault_bytes_s": (1 << 20, 8 << 20, 32 << 20),  # an SD card reads 20 to 90 MB/s
    "major_faults_s":  (20, 200, 1000),               # each waits for one read: 0.1 ms on NVMe, 1 to 10 on a card
    "group_faults_s":  (20, 200, 1000),
    "some_percent":    (10, 30, 60),
    "full_percent":    (2, 10, 25),
}  # fmt: skip
"""From which value on a sensor means which level."""
_MACHINE_WIDE: Final = frozenset({"some_percent", "full_percent"})
"""Of the whole machine these mean `SOME` at most, as do the faults of a whole group: who waits may be another program,
whom nothing that we give up would help. What all lack shows in MemAvailable, what we suffer in our own faults."""
_CUT_PER_S: Final = {Pressure.NONE: 0.0, Pressure.SOME: 0.0, Pressure.HIGH: 0.02, Pressure.SEVERE: 0.05}
_WORDS: Final = {
    "refault_bytes_s": ("refaults of {:.1f} MB/s", 1e-6),
    "major_faults_s": ("{:.0f} major faults a second", 1.0),
    "group_faults_s": ("{:.0f} major faults a second in our control group", 1.0),
    "some_percent": ("work waits for memory {:.0f} % of the time", 1.0),
    "full_percent": ("all work waits for memory {:.0f} % of the time", 1.0),
}


@dataclass(frozen=True, slots=True)
class PressureState:
    """What is in force, and since when the sensors say otherwise."""

    level: Pressure = Pressure.NONE
    why: str = ""
    """The sensor that says so, with its value; empty at `NONE`."""
    cap_bytes: int | None = None
    """What may be reserved while it lasts and until it has recovered; None when the pressure limits nothing."""
    began_bytes: int = 0
    """What was reserved when it began."""
    at_ns: int | None = None
    above_ns: int | None = None
    """Since when the sensors say more than `level`."""
    below_ns: int | None = None
    """Since when they say clearly less."""

    def ceiling(self, available_bytes: int) -> int:
        """Return how much of a budget of `available_bytes` may be reserved."""
        return available_bytes if self.cap_bytes is None else min(available_bytes, self.cap_bytes)


CALM: Final = PressureState()


def judge(sample: PressureSample, *, scale: float = 1.0) -> Pressure:
    """Return the highest level that a sensor means, with every value times `scale`; one that is missing means none."""
    return max(_says(sample, name, scale) for name in THRESHOLDS)


def step(
    state: PressureState, sample: PressureSample, *, available_bytes: int, reserved_bytes: int, now_ns: int
) -> PressureState:
    """Return what is in force from now on.

    `available_bytes` is the budget without pressure, `reserved_bytes` what is reserved of it.
    """
    says, falls_to = judge(sample), judge(sample, scale=2.0)
    above_ns = (state.above_ns if state.above_ns is not None else now_ns) if says > state.level else None
    below_ns = (state.below_ns if state.below_ns is not None else now_ns) if falls_to < state.level else None
    level, why = state.level, state.why
    if above_ns is not None and now_ns - above_ns >= RISE_NS:
        level, above_ns = says, None
    elif below_ns is not None and now_ns - below_ns >= FALL_NS:
        level, below_ns = Pressure(level - 1), None
    if says and says >= level:
        why = explain(sample)
    since_ns = now_ns if state.at_ns is None else state.at_ns
    seconds = min(max(0, now_ns - since_ns), _LONGEST_STEP_NS) / NS_PER_S
    begins = level > Pressure.NONE and state.level is Pressure.NONE
    state = replace(state, level=level, why=why if level else "", at_ns=now_ns, above_ns=above_ns, below_ns=below_ns)
    if begins:
        return _begin(state, min(reserved_bytes, available_bytes))
    if level is Pressure.NONE:
        return _recover(state, available_bytes, round(available_bytes * RECOVER_PER_S * seconds))
    return _cut(state, round(state.began_bytes * _CUT_PER_S[level] * seconds))


def _begin(state: PressureState, reserved_bytes: int) -> PressureState:
    if state.cap_bytes is None:
        return replace(state, cap_bytes=reserved_bytes, began_bytes=reserved_bytes)
    floor_bytes = state.began_bytes // 2  # it comes back before it had recovered: the same episode
    return replace(state, cap_bytes=min(state.cap_bytes, max(reserved_bytes, floor_bytes)))


def _cut(state: PressureState, by_bytes: int) -> PressureState:
    assert state.cap_bytes is not None, "set when it began"
    floor_bytes = min(state.cap_bytes, state.began_bytes // 2)
    return replace(state, cap_bytes=max(floor_bytes, state.cap_bytes - by_bytes))


def _recover(state: PressureState, available_bytes: int, by_bytes: int) -> PressureState:
    if state.cap_bytes is None:
        return state
    cap_bytes = state.cap_bytes + by_bytes
    if cap_bytes >= available_bytes:
        return replace(state, cap_bytes=None, began_bytes=0)
    return replace(state, cap_bytes=cap_bytes)


def explain(sample: PressureSample) -> str:
    """Return the sensor that says most, in words; empty when none says anything."""
    says = judge(sample)
    for name, (text, factor) in _WORDS.items():
        if says and _says(sample, name, 1.0) is says:
            return text.format(_value(sample, name) * factor)
    return ""


def _value(sample: PressureSample, name: str) -> float:
    value: float | None = getattr(sample, name)
    return value or 0.0


def _says(sample: PressureSample, name: str, scale: float) -> Pressure:
    value = _value(sample, name) * scale
    level = Pressure(sum(value >= threshold for threshold in THRESHOLDS[name]))
    is_of_others = name == "group_faults_s" or (sample.machine_wide and name in _MACHINE_WIDE)
    return min(level, Pressure.SOME) if is_of_others else level
