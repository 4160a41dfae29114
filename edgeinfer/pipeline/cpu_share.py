"""Bound the share of the event loop's time that one source may take, however fast it writes. Pure."""

from __future__ import annotations

from edgeinfer.clock import NS_PER_MS

SHARE = 0.2
"""Of one core, at most: some 280 MB/s, enough for raw 1080p RGB at 30 frames a second (187 MB/s)."""
_NS_PER_BYTE = 0.7
"""What is charged for reading the pipe, which the event loop does before anybody can measure it."""
_SLICE_NS = 5 * NS_PER_MS
"""What may be taken at once before a pause is due: shorter ones would be mostly rounding."""


class CpuShare:
    """How much of its share a source has used."""

    def __init__(self) -> None:
        self._owed_ns = 0.0
        self._last_ns: int | None = None

    def pause_ns(self, read_bytes: int, spent_ns: int, now_ns: int) -> int:
        """Return how long to leave the loop to others, after `spent_ns` of CPU time for what was read, at `now_ns`."""
        spent_ns += round(read_bytes * _NS_PER_BYTE)
        idle_ns = 0 if self._last_ns is None else max(0, now_ns - spent_ns - self._last_ns)
        self._owed_ns = max(0.0, self._owed_ns - idle_ns * SHARE / (1 - SHARE)) + spent_ns
        self._last_ns = now_ns
        return round(self._owed_ns * (1 - SHARE) / SHARE) if self._owed_ns >= _SLICE_NS else 0
