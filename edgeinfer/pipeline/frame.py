"""Say what a source gives: frames, one at a time, the newest first; and hold the newest one until it is taken.

A source never builds a backlog. What a loop does not take in time is replaced by what is newer, and counted.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Protocol

from edgeinfer import oip
from edgeinfer.errors import EdgeInferError
from edgeinfer.request import Payload

MAX_FRAME_BYTES = 32 << 20
"""More than an uncompressed 4K image; a larger one is a broken source."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One thing to run a model on: an encoded medium, or with a `datatype` a raw little-endian tensor."""

    data: bytes
    content_type: str
    captured_ns: int
    """Monotonic time at which it came into being; deadlines count from here."""
    name: str
    """What people know it by: a file name, a position in a recording, a number."""
    sequence_start: bool = False
    """Whether what came before it is not its predecessor: the start, or something was lost between."""
    datatype: str = ""
    shape: tuple[int, ...] = ()

    def payload(self, input_name: str) -> Payload:
        """Return the request body that gives this frame to the input of that name."""
        if self.datatype:
            return oip.encode_request([(input_name, self.datatype, self.shape, self.data)])
        return oip.encode_media(input_name, self.data, self.content_type)


class SourceError(EdgeInferError):
    """A source cannot give frames now; the text says what to mend. The loop tries again, less and less often."""


@dataclass(frozen=True, slots=True)
class SourceSnapshot:
    """How a source stands."""

    taken: int
    """Frames that the loop took."""
    skipped: int
    """Frames that were replaced by newer ones, or could not be read."""
    restarts: int = 0
    problem: str = ""
    """What is wrong right now, in words; empty when nothing is."""


class Source(Protocol):
    """Gives frames to one loop. Loop thread only."""

    async def run(self) -> None:
        """Do what has to go on beside `next_frame`, for ever; return at once when there is nothing."""
        ...

    async def next_frame(self) -> Frame | None:
        """Return the newest frame that was not taken yet, waiting for one; None when there will be no more.

        Raises:
            SourceError: there is none now, and waiting alone does not help.
        """
        ...

    def snapshot(self) -> SourceSnapshot:
        """Return how it stands."""
        ...


class NewestFrame:
    """Room for one frame: a newer one replaces it."""

    def __init__(self) -> None:
        self._frame: Frame | None = None
        self._filled = asyncio.Event()
        self._gap = False
        self.taken = 0
        self.replaced = 0

    def put(self, frame: Frame, *, skipped: int = 0) -> None:
        """Offer a frame; one that still waits is lost, and the next taken says that its predecessor is missing.

        So are `skipped` frames that came together with it, before it.
        """
        lost = skipped + (self._frame is not None)
        if lost:
            self.replaced += lost
            self._gap = True
        self._frame = frame
        self._filled.set()

    async def take(self) -> Frame:
        """Return the frame, waiting for one."""
        await self._filled.wait()
        frame = self._frame
        assert frame is not None
        self._frame = None
        self._filled.clear()
        self.taken += 1
        gap, self._gap = self._gap, False
        if gap and not frame.sequence_start:
            return replace(frame, sequence_start=True)
        return frame
