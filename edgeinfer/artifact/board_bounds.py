"""How far each number of a board file may go: beyond these it is a slip of the pen, not a board.

A test holds `BOUNDS` against the board's dataclasses: a number without bounds does not pass. Elements of a list have
one entry, written `trips[]`. What only makes sense together is `board.check_board`'s business.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edgeinfer.errors import Problem

MAX_ELEMENTS = 256
"""Of any list."""
MAX_TEXT_BYTES = 4096
_TIB = 1 << 40


@dataclass(frozen=True, slots=True)
class Bound:
    """Least and most of a number, both allowed, in the unit that its field holds."""

    least: float
    most: float
    scale: float = 1
    """How many of that unit are one of what the file says."""
    unit: str = ""


def _celsius(least: float, most: float) -> Bound:
    return Bound(least * 1000, most * 1000, 1000, " C")


BOUNDS: dict[str, Bound] = {
    "cpu.cores": Bound(1, 1024),
    "cpu.max_clock_mhz": Bound(100, 10_000),
    "memory.total": Bound(16 << 20, _TIB, 1 << 20, " MiB"),
    "memory.ceiling": Bound(1 << 20, _TIB, 1 << 20, " MiB"),
    "memory.reserve": Bound(0, _TIB, 1 << 20, " MiB"),
    "memory.bandwidth_mb_s": Bound(100, 1_000_000),
    "thermal.firmware_trip_c": _celsius(40, 125),
    "thermal.trips[].at_c": _celsius(30, 124),
    "thermal.trips[].hysteresis_c": _celsius(0.5, 30),
    "thermal.trips[].duty_cycle": Bound(0, 1),
    "thermal.dwell": Bound(0, 600e9, 1e9, " s"),
    "thermal.fault_duty_cycle": Bound(0, 1),
    "lab.resistance_c_per_w": Bound(0.05, 200),
    "lab.capacity_j_per_c": Bound(0.1, 100_000),
    "lab.idle_w": Bound(0, 500),
    "lab.watt_per_core": Bound(0.01, 100),
    "lab.throttled_share": Bound(0.05, 1),
    "lab.throttle_hysteresis_c": Bound(0, 30),
}  # fmt: skip


def check_bounds(section: Any, path: str = "") -> Iterator[Problem]:
    """Yield every number, text and list of a board, or a section of one, that lies beyond its bounds.

    None, wherever it stands, is nothing: a key that was left out, or one that could not be read.
    """
    for field in dataclasses.fields(section):
        yield from _check(getattr(section, field.name), f"{path}.{field.name}".lstrip("."))


def _check(value: Any, path: str) -> Iterator[Problem]:
    if isinstance(value, list):
        if len(value) > MAX_ELEMENTS:
            yield Problem(path, f"has {len(value)} elements, at most {MAX_ELEMENTS} are taken")
            return
        for index, item in enumerate(value):
            yield from _check(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value):
        yield from check_bounds(value, path)
    elif isinstance(value, str):
        if len(value.encode()) > MAX_TEXT_BYTES:
            yield Problem(path, f"has {len(value.encode())} bytes, at most {MAX_TEXT_BYTES} are taken")
    elif value is not None and not isinstance(value, bool):
        bound = BOUNDS[re.sub(r"\[\d+\]", "[]", path)]
        if not bound.least <= value <= bound.most:
            said = (f"{number / bound.scale:.9g}{bound.unit}" for number in (value, bound.least, bound.most))
            yield Problem(path, "{} is not between {} and {}".format(*said))
