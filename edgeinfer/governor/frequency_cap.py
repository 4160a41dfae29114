"""Cap the CPU's clock, where that is wanted and permitted, and put back what was there before.

A lower clock at a lower voltage does the same work with less heat than the full clock with pauses. `split` decides how
much of a duty cycle the clock takes over (pure); `FrequencyCap` is the only writer of `scaling_max_freq`. It writes in
a thread of its own, because a driver may take its time, and never more than what was there before.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.clock import NS_PER_S
from edgeinfer.sensors.cpufreq import FrequencyPolicy
from edgeinfer.sensors.probe import Probe, ThreadProbe, Waiting

_log = logging.getLogger(__name__)

FLOOR = 0.5
"""Share of the full clock below which a cap saves little: the voltage no longer falls, and deadlines suffer."""
_STEP = 0.1
"""Boards have some ten operating points; between two of them the duty cycle does the rest."""
_DWELL_NS = 10 * NS_PER_S
"""How soon the clock may be raised again, or given back."""


@dataclass(frozen=True, slots=True)
class CapState:
    """The cap that is asked for."""

    share: float = 1.0
    """Of the full clock; 1.0: none."""
    since_ns: int | None = None


def split(duty: float, state: CapState, now_ns: int) -> CapState:
    """Return the cap with which a duty cycle is reached: lowered at once, raised after a dwell and a whole step.

    The cap is the next step above the duty cycle, never below `FLOOR`.
    """
    wanted = min(1.0, max(FLOOR, math.ceil(round(duty / _STEP, 6)) * _STEP))
    rested = state.since_ns is None or now_ns - state.since_ns >= _DWELL_NS
    if wanted < state.share - 1e-6 or (wanted > state.share + 1e-6 and rested):
        return CapState(wanted, now_ns)
    return state


def duty_under_cap(duty: float, asked: float, policies: Sequence[FrequencyPolicy]) -> float:
    """Return which duty cycle is left to obey once the clock is capped: as much work as `duty` at the full clock.

    Only a cap that was asked for and is seen in force on every awake cluster counts; one of somebody else's doesn't.
    """
    seen = 0.0
    for policy in policies:
        if policy.cpus:
            known = policy.cap_hz is not None and policy.max_hz
            seen = max(seen, (policy.cap_hz or 0) / (policy.max_hz or 1) if known else 1.0)
    share = max(asked, seen)
    if not policies or share >= 1 or share <= 0:
        return duty
    return min(1.0, math.floor(duty / share * 100 + 1e-9) / 100)


class FrequencyCap:
    """The writer. Loop thread only; `close` puts everything back."""

    def __init__(
        self, sys_root: Path, *, make_probe: Callable[[str, Callable[[], float]], Probe[float]] = ThreadProbe
    ) -> None:
        """Write nothing yet. `make_probe`: what calls the writer, `InlineProbe` in tests."""
        self._folder = sys_root / "devices" / "system" / "cpu"
        self._original_hz: dict[str, int] = {}
        self._jobs: tuple[tuple[Path, int], ...] = ()
        self._share = self._wanted = 1.0
        self._probe: Probe[float] = make_probe("frequency_cap", self._write)
        self._problem = ""

    def ask(self, share: float, policies: Sequence[FrequencyPolicy], now_ns: int) -> int | None:
        """Ask for a share of every cluster's full clock; return the fastest cluster's cap in Hz, None without one."""
        writable = [item for item in policies if item.cap_writable and item.max_hz and item.cap_hz and item.cpus]
        if share >= 1 and not self._original_hz:
            return None
        caps = {}
        for item in writable:
            assert item.max_hz is not None
            assert item.cap_hz is not None
            original_hz = self._original_hz.setdefault(item.name, item.cap_hz)
            least_hz = item.min_hz or 0
            caps[item.name] = min(original_hz, max(least_hz, round(item.max_hz * share)))
        self._jobs = tuple((self._path(name), hz) for name, hz in caps.items())
        self._wanted = share
        if self._share != self._wanted and self._jobs:
            answer = self._probe.poll(now_ns)
            if isinstance(answer, OSError):
                self._complain(str(answer))
            elif not isinstance(answer, Waiting):
                self._share, self._problem = answer, ""
        return max(caps.values(), default=None) if share < 1 else None

    def close(self) -> None:
        """Put back what was there before the first cap."""
        self._probe.close()
        for name, hz in self._original_hz.items():
            try:
                _put(self._path(name), hz)
            except OSError as error:
                _log.warning("frequency_cap policy=%s restore_hz=%d error=%r", name, hz, str(error))
        self._original_hz.clear()

    def _path(self, name: str) -> Path:
        folder = self._folder / "cpufreq" / name if name.startswith("policy") else self._folder / name / "cpufreq"
        return folder / "scaling_max_freq"

    def _write(self) -> float:
        share, jobs = self._wanted, self._jobs
        for path, hz in jobs:
            _put(path, hz)
        return share

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            _log.warning("frequency_cap error=%r: the duty cycle alone holds work back", problem)


def _put(path: Path, hz: int) -> None:
    with path.open("r+", encoding="ascii") as file:  # never makes a file
        file.write(str(hz // 1000))
        file.truncate()
