"""How much of everything an operator may ask for: each number of a service config lies between two others.

Beyond these a value is a slip of the pen, or does harm (a period of nothing is a flood, a frame of terabytes no frame).
A test holds `BOUNDS` against the sections: a number without bounds does not pass. Texts and lists have one bound for
all. What only makes sense together is `check`'s business.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.clock import NS_PER_MS, NS_PER_S
from edgeinfer.config.sections import (
    BrokerSection,
    CameraSource,
    CommandSource,
    DeviceConfig,
    JsonLinesSink,
    LoopSection,
    MemorySection,
    MicrophoneSource,
    ModelSection,
    MqttSink,
    NearbyConfig,
    OffloadSection,
    RtspSource,
    SchedulerSection,
    TelemetrySection,
    ThermalSection,
    WavSource,
)
from edgeinfer.errors import Problem
from edgeinfer.quantity import Bytes, Nanoseconds

MAX_OFFLOAD_BYTES = 15 << 20
"""A link takes messages of at most 16 MiB; a header has to fit in, too."""
MAX_TEXT_BYTES = 16 << 10
MAX_ELEMENTS = 1024
"""Of any list but those in `COUNTS`."""

_HOUR_NS = 3600 * NS_PER_S
_TIB = 1 << 40
_FRAME_BYTES = 32 << 20
"""The largest frame that a loop takes."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Least and most of a number, both allowed, in the unit that its field holds."""

    least: int
    most: int


_PRIORITY = Bound(-1000, 1000)
_SAMPLES = Bound(1, _FRAME_BYTES // 4)
_RATE_HZ = Bound(1, 768_000)
_PIXELS = Bound(0, 16_384)
_FPS = Bound(0, 1000)

BOUNDS: dict[tuple[type[Any], str], Bound] = {
    (MemorySection, "ceiling"): Bound(1 << 20, _TIB),
    (MemorySection, "reserve"): Bound(0, _TIB),
    (ThermalSection, "sample_period"): Bound(10 * NS_PER_MS, 600 * NS_PER_S),
    (SchedulerSection, "queue_limit"): Bound(1, 65_536),
    (SchedulerSection, "kill_grace"): Bound(0, 60 * NS_PER_S),
    (SchedulerSection, "drain_timeout"): Bound(0, 600 * NS_PER_S),
    (SchedulerSection, "cpus"): Bound(0, 4095),
    (BrokerSection, "port"): Bound(1, 65_535),
    (BrokerSection, "keepalive_s"): Bound(1, 3600),
    (OffloadSection, "max_in_flight"): Bound(1, 1024),
    (OffloadSection, "max_request"): Bound(1, MAX_OFFLOAD_BYTES),
    (TelemetrySection, "report_period"): Bound(100 * NS_PER_MS, 24 * _HOUR_NS),
    (ModelSection, "threads"): Bound(1, 256),
    (ModelSection, "priority"): _PRIORITY,
    (ModelSection, "workers"): Bound(1, 16),
    (CommandSource, "frame_bytes"): Bound(0, _FRAME_BYTES),
    (WavSource, "chunk_samples"): _SAMPLES,
    (WavSource, "sample_rate_hz"): _RATE_HZ,
    (MicrophoneSource, "chunk_samples"): _SAMPLES,
    (MicrophoneSource, "sample_rate_hz"): _RATE_HZ,
    (CameraSource, "width"): _PIXELS,
    (CameraSource, "height"): _PIXELS,
    (CameraSource, "fps"): _FPS,
    (RtspSource, "width"): _PIXELS,
    (RtspSource, "fps"): _FPS,
    (MqttSink, "qos"): Bound(0, 1),
    (JsonLinesSink, "max_bytes"): Bound(1 << 10, _TIB),
    (LoopSection, "period"): Bound(NS_PER_MS, 168 * _HOUR_NS),
    (LoopSection, "deadline"): Bound(NS_PER_MS, _HOUR_NS),
    (LoopSection, "priority"): _PRIORITY,
    (NearbyConfig, "max_per_device"): Bound(1, 1024),
    (NearbyConfig, "advert_period"): Bound(100 * NS_PER_MS, _HOUR_NS),
}

COUNTS: dict[tuple[type[Any], str], int] = {
    (DeviceConfig, "model"): 64, (DeviceConfig, "loop"): 64, (NearbyConfig, "model"): 64,
}  # fmt: skip
"""Most elements of lists whose every element has a place in each report."""


def check_bounds(section: Any, path: str = "") -> Iterator[Problem]:
    """Yield every number, text and list of a section, and of those in it, that lies beyond its bounds.

    None, wherever it stands, is nothing: a key that was left out, or one that could not be read.
    """
    hints = typing.get_type_hints(type(section))
    for key in (field.name for field in dataclasses.fields(section)):
        value, bound = getattr(section, key), BOUNDS.get((type(section), key))
        most = COUNTS.get((type(section), key), MAX_ELEMENTS)
        if isinstance(value, list) and len(value) > most:
            yield Problem(f"{path}.{key}".lstrip("."), f"has {len(value)} elements, at most {most} are taken")
            continue
        yield from _check(value, f"{path}.{key}".lstrip("."), hints[key], bound)


def _check(value: Any, path: str, hint: Any, bound: Bound | None) -> Iterator[Problem]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _check(item, f"{path}[{index}]", hint, bound)
    elif dataclasses.is_dataclass(value):
        yield from check_bounds(value, path)
    elif isinstance(value, str | Path):
        if "\0" in str(value):
            yield Problem(path, "holds a NUL character")
        if (size := len(str(value).encode())) > MAX_TEXT_BYTES:
            yield Problem(path, f"has {size} bytes, at most {MAX_TEXT_BYTES} are taken")
    elif bound is not None and value is not None and not bound.least <= value <= bound.most:
        said, least, most = (_said(number, hint) for number in (value, bound.least, bound.most))
        yield Problem(path, f"{said} is not between {least} and {most}")


def _said(number: int, hint: Any) -> str:
    """Return a number as the operator would write it."""
    if _is(hint, Nanoseconds):
        units = {"h": _HOUR_NS, "min": 60 * NS_PER_S, "s": NS_PER_S, "ms": NS_PER_MS, "us": 1000}
    elif _is(hint, Bytes):
        units = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
    else:
        return str(number)
    for unit, size in units.items():
        if number and number % size == 0:
            return f"{number // size} {unit}"
    return f"{number / NS_PER_MS:g} ms" if "h" in units else f"{number} B"


def _is(hint: Any, kind: Any) -> bool:
    return hint is kind or kind in typing.get_args(hint)
