"""Give the newest frame of a child process's standard output.

How the child is kept running is `child`'s, how frames are found in its output is `framing`'s. Only the newest frame is
kept; what a slow loop does not take is replaced and counted.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Awaitable, Callable

from edgeinfer.clock import Clock
from edgeinfer.config import CommandSource
from edgeinfer.pipeline.child import KeptChild, Launch
from edgeinfer.pipeline.frame import Frame, NewestFrame, SourceSnapshot
from edgeinfer.pipeline.framing import Framer, make_framer


class CommandFrames:
    """A `Source` over a child's standard output."""

    def __init__(
        self,
        section: CommandSource,
        *,
        name: str,
        clock: Clock,
        dice: random.Random | None = None,
        prepare: Callable[[], Awaitable[Launch]] | None = None,
    ) -> None:
        """Make a source for the loop `name`. `prepare` says how to start the child; by default as the section does."""
        self._section = section
        self._clock = clock
        self._newest = NewestFrame()
        self._content_type = section.content_type or _default_content_type(section.framing)
        self._number = 0
        self._child = KeptChild(
            name,
            prepare=prepare or self._plain,
            framer=functools.partial(make_framer, section),
            take=self._take,
            framing=section.framing,
            clock=clock,
            dice=dice,
        )

    async def run(self) -> None:
        """Keep the child running, for ever; end it when cancelled."""
        await self._child.run()

    async def next_frame(self) -> Frame | None:
        """Return the newest frame, waiting for one for as long as it takes."""
        return await self._newest.take()

    def snapshot(self) -> SourceSnapshot:
        """Return how it stands."""
        skipped = self._newest.replaced + self._child.lost
        return SourceSnapshot(self._newest.taken, skipped, self._child.restarts, self._child.problem)

    async def _plain(self) -> Launch:
        return Launch(tuple(self._section.argv))

    def _take(self, frames: list[bytes], framer: Framer, first: bool) -> None:
        self._number += framer.skipped + len(frames)
        newest = Frame(frames[-1], self._content_type, self._clock.now_ns(), f"#{self._number}", sequence_start=first)
        self._newest.put(newest, skipped=framer.skipped + len(frames) - 1)


def _default_content_type(framing: str) -> str:
    return {"jpeg": "image/jpeg", "lines": "text/plain"}.get(framing, "application/octet-stream")
