"""Tell what the board draws and how many joules it has used, without ever waiting for the driver.

Owns the choice of one rail or domain, the thread that reads it (there is none where nothing can be read) and the sum.
What a board without such a sensor uses is unknown: then there is no number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.sensors.energy import EnergyState, add_sample
from edgeinfer.sensors.power import (
    EnergyDomain,
    PowerSample,
    Rail,
    choose,
    find_domains,
    find_rails,
    read_power,
)
from edgeinfer.sensors.probe import Probe, ThreadProbe, Waiting
from edgeinfer.sensors.state import ChangeLog, SensorState

_BLOCKED_NS = 2 * NS_PER_S
_SEARCH_NS = 60 * NS_PER_S
"""How soon to look again for a source while there is none, or it has gone."""
_NOTHING_NS = 10 * NS_PER_S
"""A source that shows no power at all for so long does not measure: a board that runs us draws some. Many PCs have a
`psys` counter that never moves."""


@dataclass(frozen=True, slots=True)
class PowerReading:
    """What the board draws, and what it has used since the start."""

    source: str
    """The rail or domain; empty where there is none."""
    state: SensorState
    detail: str = ""
    power_mw: int | None = None
    """Over the last interval for a domain, now for a rail; None in a fault and before it is known."""
    interval_j: float | None = None
    """Joules since the reading before; None when that is unknown."""
    total_j: float = 0.0
    """Joules of all intervals that are known."""
    known_s: float = 0.0
    """How long they are together."""


NO_POWER = PowerReading("", SensorState.MISSING, "no rail or domain that tells of the whole board")


class MakePowerProbe(Protocol):
    """How the source is asked: `ThreadProbe`, or `InlineProbe` in tests."""

    def __call__(self, name: str, read: Callable[[], PowerSample], /) -> Probe[PowerSample]:
        """Return a probe named `name` that asks by calling `read`."""
        ...


class PowerMeter:
    """Reads one rail or domain. Loop thread only; `read` waits 2 ms at most."""

    def __init__(
        self, sys_root: Path, wanted: Sequence[str], *, clock: Clock, make_probe: MakePowerProbe = ThreadProbe
    ) -> None:
        """Look for nothing yet. `wanted`: names of rails or domains in order of preference, of the board file."""
        self._sys_root = sys_root
        self._wanted = tuple(wanted)
        self._clock = clock
        self._make_probe = make_probe
        self._source: Rail | EnergyDomain | None = None
        self._probe: Probe[PowerSample] | None = None
        self._next_search_ns: int | None = None
        self._energy = EnergyState()
        self._nothing_ns = 0
        self._last = NO_POWER
        self._changes = ChangeLog()

    def read(self) -> PowerReading:
        """Return the newest reading, at most one round old; a fault has no number."""
        now_ns = self._clock.now_ns()
        if self._next_search_ns is None or (self._last.state is SensorState.MISSING and now_ns >= self._next_search_ns):
            self._search()
            self._next_search_ns = now_ns + _SEARCH_NS
        if self._probe is None or self._source is None:
            return self._last
        answer = self._probe.poll(now_ns)
        if isinstance(answer, Waiting):
            if now_ns - answer.since_ns < _BLOCKED_NS:
                return self._last
            return self._fault(SensorState.BLOCKED, "does not answer", now_ns)
        if isinstance(answer, OSError):
            return self._fault(*_judge(answer), now_ns)
        return self._take(answer, now_ns)

    def close(self) -> None:
        """End the thread."""
        if self._probe is not None:
            self._probe.close()

    def _take(self, sample: PowerSample, now_ns: int) -> PowerReading:
        assert self._source is not None
        range_uj = self._source.range_uj if isinstance(self._source, EnergyDomain) else 0
        before = self._energy
        self._energy, interval = add_sample(before, sample, now_ns, range_uj)
        if interval is None or interval.joules > 0:
            self._nothing_ns = now_ns
        elif now_ns - self._nothing_ns >= _NOTHING_NS:
            self._energy = replace(self._energy, known_s=before.known_s)
            seconds = (now_ns - self._nothing_ns) // NS_PER_S
            return self._told(SensorState.FROZEN, f"nothing used for {seconds} s, and yet we run", now_ns, None, None)
        power_mw = sample.power_mw
        if power_mw is None and interval is not None:
            power_mw = round(interval.joules / interval.seconds * 1000)
        return self._told(SensorState.OK, "", now_ns, power_mw, None if interval is None else interval.joules)

    def _fault(self, state: SensorState, detail: str, now_ns: int) -> PowerReading:
        self._energy, _ = add_sample(self._energy, None, now_ns)
        return self._told(state, detail, now_ns, None, None)

    def _told(
        self, state: SensorState, detail: str, now_ns: int, power_mw: int | None, interval_j: float | None
    ) -> PowerReading:
        assert self._source is not None
        name, energy = self._source.name, self._energy
        self._changes.note(f"power({name})", state, detail, now_ns)
        self._last = PowerReading(name, state, detail, power_mw, interval_j, energy.total_j, energy.known_s)
        return self._last

    def _search(self) -> None:
        """Choose a source anew; the one there was may have got another index."""
        found = choose(find_rails(self._sys_root), find_domains(self._sys_root), self._wanted)
        if found == self._source:
            return
        self.close()
        self._source, self._probe = found, None
        if found is not None:
            self._probe = self._make_probe("power", lambda: read_power(found))


def _judge(error: OSError) -> tuple[SensorState, str]:
    if isinstance(error, PermissionError):
        hint = "only root may read it (see docs/thermal.md for the udev rule)"
        return SensorState.NO_PERMISSION, f"{error.filename}: {hint}"
    absurd = error.errno is None
    return SensorState.ABSURD if absurd else SensorState.MISSING, str(error.strerror or error)
