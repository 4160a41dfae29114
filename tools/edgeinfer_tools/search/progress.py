"""Show how a search gets on: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

from edgeinfer_tools.search.explore import Progress, Row
from edgeinfer_tools.sizes import human


class PlainProgress:
    """A line per look and per candidate."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def looking(self, what: str, done: int, total: int, remaining_s: float | None) -> None:
        """See `Progress`."""
        self._say(f"{f'[{done}/{total}]':<9} {what}{left(remaining_s)}")

    def found(self, row: Row) -> None:
        """See `Progress`."""
        self._say(f"{'':<9} {told(row)}")

    def end(self) -> None:
        """See `Progress`."""


class LiveProgress:
    """One line that changes, and above it a line per candidate."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.status import Status

        self._console = Console(file=stream, highlight=False)
        self._status = Status("", console=self._console)

    def looking(self, what: str, done: int, total: int, remaining_s: float | None) -> None:
        """See `Progress`."""
        self._status.update(f"{done} of {total}  {what}{left(remaining_s)}")
        self._status.start()

    def found(self, row: Row) -> None:
        """See `Progress`."""
        self._status.stop()
        self._console.print(told(row), markup=False)

    def end(self) -> None:
        """See `Progress`."""
        self._status.stop()


def progress_for(stream: TextIO, say: Callable[[str], None]) -> Progress:
    """Return a live line when `stream` is a terminal, plain lines when it is not."""
    return LiveProgress(stream) if stream.isatty() and stream is sys.stderr else PlainProgress(say)


def told(row: Row) -> str:
    """Return one line about a candidate."""
    known = " (known from before)" if row.known else ""
    if row.point is None:
        return f"{row.candidate.name}: {row.outcome}{f', {row.reason}' if row.reason else ''}{known}"
    point = row.point
    figures = f"quality {point.quality:.4f}, p99 {point.p99_us / 1000:.2f} ms, {human(point.size_bytes)}"
    return f"{row.candidate.name}: {figures}, peak {human(point.peak_bytes)}{known}"


def left(remaining_s: float | None) -> str:
    """Return `, about 40 s left`, or nothing when it cannot be told."""
    if remaining_s is None or remaining_s < 1:
        return ""
    if remaining_s < 100:
        return f", about {remaining_s:.0f} s left"
    return f", about {remaining_s / 60:.0f} min left"
