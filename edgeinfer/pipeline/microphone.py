"""Give what a microphone hears, in chunks of exactly the model's size, without a gap or with one that is told.

A chunk is a raw tensor, FP32 [1, N], mono, -1..1. It came into being when its last sample was heard, which is told by
its place in what was read. Devices deliver several chunks at once, so a few wait; when more do, the loop is too slow:
all but the newest are dropped, and it says that its predecessor is missing.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from edgeinfer.clock import NS_PER_MS, NS_PER_S, Clock
from edgeinfer.config import MicrophoneSource
from edgeinfer.pipeline.child import KeptChild, Launch
from edgeinfer.pipeline.frame import Frame, SourceSnapshot
from edgeinfer.pipeline.framing import FixedFramer, Framer
from edgeinfer.pipeline.pcm import mono, raw_floats

MOST_WAITING_NS = 250 * NS_PER_MS
"""Sound that may wait: twice what devices deliver at once."""
_SAMPLE_BYTES = 2


@dataclass(frozen=True, slots=True)
class _Chunk:
    samples: bytes
    captured_ns: int
    position: int
    starts: bool


class MicrophoneFrames:
    """A `Source` over a child that writes S16_LE mono samples."""

    def __init__(
        self,
        section: MicrophoneSource,
        *,
        name: str,
        clock: Clock,
        prepare: Callable[[], Awaitable[Launch]],
        dice: random.Random | None = None,
    ) -> None:
        self._size = section.chunk_samples
        self._rate_hz = section.sample_rate_hz
        self._clock = clock
        chunk_ns = self._size * NS_PER_S // self._rate_hz
        self._most_waiting = max(2, -(-MOST_WAITING_NS // max(1, chunk_ns)))
        self._waiting: deque[_Chunk] = deque()
        self._filled = asyncio.Event()
        self._position = 0
        self._gap = False
        self._taken = self._skipped = 0
        self._child = KeptChild(
            name,
            prepare=prepare,
            framer=functools.partial(FixedFramer, self._size * _SAMPLE_BYTES),
            take=self._take,
            framing="fixed",
            clock=clock,
            dice=dice,
        )

    async def run(self) -> None:
        """Keep recording, for ever; end it when cancelled."""
        await self._child.run()

    async def next_frame(self) -> Frame | None:
        """Return the oldest chunk of those few that wait, waiting for one for as long as it takes."""
        await self._filled.wait()
        chunk = self._waiting.popleft()
        if not self._waiting:
            self._filled.clear()
        self._taken += 1
        samples = raw_floats(mono(chunk.samples, _SAMPLE_BYTES, 1))
        name = f"@{chunk.position}"
        return Frame(samples, "", chunk.captured_ns, name, chunk.starts, "FP32", (1, self._size))

    def snapshot(self) -> SourceSnapshot:
        """Return how it stands."""
        skipped = self._skipped + self._child.lost
        return SourceSnapshot(self._taken, skipped, self._child.restarts, self._child.problem)

    def _take(self, frames: list[bytes], framer: Framer, first: bool) -> None:
        now_ns = self._clock.now_ns()
        after = framer.pending_bytes // _SAMPLE_BYTES + (len(frames) - 1) * self._size
        for samples in frames:
            heard_ns = now_ns - after * NS_PER_S // self._rate_hz
            self._waiting.append(_Chunk(samples, heard_ns, self._position, starts=first or self._gap))
            first = self._gap = False
            self._position += self._size
            after -= self._size
            if len(self._waiting) > self._most_waiting:
                self._drop_all_but_the_newest()
        self._filled.set()

    def _drop_all_but_the_newest(self) -> None:
        newest = self._waiting[-1]
        self._skipped += len(self._waiting) - 1
        self._waiting.clear()
        self._waiting.append(_Chunk(newest.samples, newest.captured_ns, newest.position, starts=True))
