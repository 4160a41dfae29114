"""Say what a device can afford, and by how much a form of a model goes over it.

Pure. Written as `peak=64MiB,p99=30ms@2,size=8MiB,drop=0.01`; each bound is optional.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from edgeinfer.errors import ConfigError, Problem
from edgeinfer_tools.sizes import human

Bound = Literal["peak", "p99", "size", "drop"]
BOUNDS: Final[tuple[Bound, ...]] = ("peak", "p99", "size", "drop")
_UNITS: Final = {"": 1, "B": 1, "KB": 1000, "KIB": 1 << 10, "MB": 10**6, "MIB": 1 << 20, "GB": 10**9, "GIB": 1 << 30}
_SIZE: Final = re.compile(r"([0-9.]+)\s*([A-Za-z]*)")
_P99: Final = re.compile(r"([0-9.]+)\s*(us|ms|s)\s*(?:@\s*([0-9]+))?")
_US: Final = {"us": 1.0, "ms": 1e3, "s": 1e6}


@dataclass(frozen=True, slots=True)
class Figures:
    """What is known of one form of a model; None where it was not measured."""

    drop: float | None = None
    """Quality that it loses against the float model."""
    size_bytes: int | None = None
    peak_bytes: int | None = None
    p99_us: int | None = None
    """At the budget's thread count."""


@dataclass(frozen=True, slots=True)
class Miss:
    """One bound that a form misses."""

    bound: Bound
    value: float
    limit: float

    @property
    def excess(self) -> float:
        """By which share of the bound it is missed; of a drop of nothing, the drop itself."""
        return (self.value - self.limit) / self.limit if self.limit else self.value

    def __str__(self) -> str:
        match self.bound:
            case "drop":
                return f"quality drops by {self.value:.4f}, {self.limit:g} is allowed ({self._over()})"
            case "p99":
                return f"p99 is {self.value / 1000:.2f} ms, the bound is {self.limit / 1000:g} ms ({self._over()})"
            case "peak" | "size":
                both = f"{human(int(self.value))}, the bound is {human(int(self.limit))}"
                return f"{'peak memory' if self.bound == 'peak' else 'size'} is {both} ({self._over()})"

    def _over(self) -> str:
        return (
            f"{self.excess:.0%} over" if self.limit and self.excess >= 0.01 else f"{self.value - self.limit:.3g} over"
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """What a form may cost at most. None: no bound."""

    peak_bytes: int | None = None
    p99_us: int | None = None
    threads: int = 1
    """Of one run, for `p99_us`."""
    size_bytes: int | None = None
    drop: float | None = None
    """Most quality that may be lost against the float model."""

    def misses(self, figures: Figures) -> tuple[Miss, ...]:
        """Return the bounds that these figures miss. What was not measured misses nothing."""
        pairs: list[tuple[Bound, float | None, float | None]] = [
            ("drop", figures.drop, self.drop),
            ("size", figures.size_bytes, self.size_bytes),
            ("peak", figures.peak_bytes, self.peak_bytes),
            ("p99", figures.p99_us, self.p99_us),
        ]
        return tuple(
            Miss(bound, value, limit)
            for bound, value, limit in pairs
            if value is not None and limit is not None and value > limit
        )

    def __str__(self) -> str:
        parts = []
        if self.peak_bytes is not None:
            parts.append(f"peak {human(self.peak_bytes)}")
        if self.p99_us is not None:
            parts.append(f"p99 {self.p99_us / 1000:g} ms with {self.threads} thread{'s'[: self.threads > 1]}")
        if self.size_bytes is not None:
            parts.append(f"size {human(self.size_bytes)}")
        if self.drop is not None:
            parts.append(f"quality drop {self.drop:g}")
        return ", ".join(parts)


def parse_budget(text: str) -> Budget:
    """Return the budget that a text such as `peak=64MiB,p99=30ms@2` names.

    Raises:
        ConfigError: with every problem.
    """
    table: dict[str, Any] = {}
    problems = []
    for part in text.split(","):
        key, equals, value = (item.strip() for item in part.partition("="))
        if not equals or not value:
            problems.append(Problem(key, "write KEY=VALUE, as in peak=64MiB,p99=30ms@2,size=8MiB,drop=0.01"))
        elif key in table:
            problems.append(Problem(key, "is there twice"))
        table[key] = value
    return budget_of(table, "--budget", problems)


def budget_of(table: Mapping[str, Any], source: str, problems: list[Problem] | None = None) -> Budget:
    """Return the budget of a table, the recipe's `[budget]` say.

    Raises:
        ConfigError: with every problem.
    """
    found = list(problems or [])
    values: dict[str, Any] = {}
    for key, value in table.items():
        try:
            match key:
                case "peak" | "size":
                    values[f"{key}_bytes"] = _size(value)
                case "p99":
                    values["p99_us"], values["threads"] = _p99(value)
                case "drop":
                    values["drop"] = _drop(value)
                case _ if not found:
                    found.append(Problem(key, f"is no bound ({', '.join(BOUNDS)})"))
        except ValueError as error:
            if not any(problem.path == key for problem in found):
                found.append(Problem(key, str(error)))
    if not values and not found:
        found.append(Problem("", f"needs at least one bound ({', '.join(BOUNDS)})"))
    if found:
        raise ConfigError(source, tuple(found))
    return Budget(**values)


def _size(value: Any) -> int:
    match = _SIZE.fullmatch(str(value).strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or (size := _number(match[1]) * unit) < 1:
        raise ValueError(f"{value!r} is no size such as 64MiB")
    return int(size)


def _p99(value: Any) -> tuple[int, int]:
    match = _P99.fullmatch(str(value).strip())
    if match is None or (micros := _number(match[1]) * _US[match[2]]) < 1:
        raise ValueError(f"{value!r} is no latency such as 30ms, or 30ms@2 for two threads")
    threads = int(match[3] or 1)
    if not 1 <= threads <= 1024:
        raise ValueError(f"{threads} threads are not between 1 and 1024")
    return int(micros), threads


def _drop(value: Any) -> float:
    text = str(value).strip()
    share = _number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= share < 1:
        raise ValueError(f"{value!r} is no drop such as 0.01 or 1%")
    return share


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not a number")
    return number
