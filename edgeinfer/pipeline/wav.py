"""Give recordings as if a microphone delivered them: one chunk of samples per chunk's time, the newest wins.

A chunk is a raw tensor, FP32 [1, N], mono, -1..1. It comes into being when its last sample would have been heard, so
its age is counted from there. A loop that is too slow misses chunks like it would with a microphone; the next one
then says that its predecessor is missing. Files are PCM WAV of 8, 16, 24 or 32 bits; nothing is resampled.
"""

from __future__ import annotations

import contextlib
import wave
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.clock import NS_PER_S, Clock, sleep_until
from edgeinfer.config import WavSource
from edgeinfer.pipeline.frame import Frame, SourceError, SourceSnapshot
from edgeinfer.pipeline.off_thread import off_thread
from edgeinfer.pipeline.pcm import mono, raw_floats
from edgeinfer.pipeline.regular import open_regular

_AHEAD_CHUNKS = 8
"""Chunks read at once: converting them holds the interpreter for 0.4 ms (2 ms on a Pi), not more."""
_REBASE_NS = NS_PER_S
"""A loop that was away for longer starts a new sequence here instead of reading on through what it missed."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    samples: bytes
    name: str
    starts_file: bool


class WavFrames:
    """A `Source` over WAV files, one after the other, for ever."""

    def __init__(self, section: WavSource, *, clock: Clock, storage: Executor) -> None:
        self._section = section
        self._clock = clock
        self._storage = storage
        self._chunk_ns = section.chunk_samples * NS_PER_S // section.sample_rate_hz
        self._chunks = _chunks(section)
        self._ahead: deque[_Chunk] = deque()
        self._next_ns: int | None = None
        """When the next chunk's last sample is heard; None before the first."""
        self._gap = True
        self._taken = 0
        self._skipped = 0
        self._problem = ""

    async def run(self) -> None:
        """Nothing goes on beside `next_frame`."""

    async def next_frame(self) -> Frame | None:
        """Return the newest whole chunk, waiting for it.

        Raises:
            SourceError: no recording, or one that cannot be played as declared.
        """
        try:
            chunk, captured_ns = await self._next()
        except SourceError as error:
            self._problem = str(error)
            self._chunks = _chunks(self._section)
            self._next_ns, self._gap = None, True
            raise
        self._problem = ""
        self._taken += 1
        start, self._gap = self._gap or chunk.starts_file, False
        shape = (1, self._section.chunk_samples)
        return Frame(chunk.samples, "", captured_ns, chunk.name, start, "FP32", shape)

    def snapshot(self) -> SourceSnapshot:
        """Return how it stands."""
        return SourceSnapshot(self._taken, self._skipped, problem=self._problem)

    async def _next(self) -> tuple[_Chunk, int]:
        now_ns = self._clock.now_ns()
        if self._next_ns is None:
            self._next_ns = now_ns + self._chunk_ns
        behind = (now_ns - self._next_ns) // self._chunk_ns
        if behind > 0:
            self._skipped += behind
            self._gap = True
            if behind * self._chunk_ns <= _REBASE_NS:
                for _ in range(behind):
                    await self._pop()
            self._next_ns += behind * self._chunk_ns
        chunk = await self._pop()
        captured_ns = self._next_ns
        await sleep_until(captured_ns, self._clock)
        self._next_ns = captured_ns + self._chunk_ns
        return chunk, captured_ns

    async def _pop(self) -> _Chunk:
        if not self._ahead:
            self._ahead.extend(await off_thread(self._storage, self._read_ahead))
        return self._ahead.popleft()

    def _read_ahead(self) -> list[_Chunk]:
        """Return the next chunks. Media thread, one call at a time."""
        return [next(self._chunks) for _ in range(_AHEAD_CHUNKS)]


def _chunks(section: WavSource) -> Iterator[_Chunk]:
    """Yield the chunks of all files for ever; the last of a file is filled up with silence."""
    size = section.chunk_samples
    while True:
        for path in _files(section.path):
            with _open(path, section.sample_rate_hz) as file:
                position = 0
                while raw := file.readframes(size):
                    samples = mono(raw, file.getsampwidth(), file.getnchannels())
                    samples.extend(0.0 for _ in range(size - len(samples)))
                    yield _Chunk(raw_floats(samples), f"{path.name}@{position}", starts_file=position == 0)
                    position += size


def _files(path: Path) -> list[Path]:
    try:
        files = sorted(path.glob("*.wav")) if path.is_dir() else [path]
    except OSError as error:
        raise SourceError(f"{path} cannot be listed: {error.strerror}") from error
    if not files:
        raise SourceError(f"{path} has no .wav file")
    return files


@contextlib.contextmanager
def _open(path: Path, sample_rate_hz: int) -> Iterator[wave.Wave_read]:
    with open_regular(path) as raw:
        try:
            with wave.open(raw, "rb") as file:
                _check(file, path, sample_rate_hz)
                yield file
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error.strerror}") from error
        except (wave.Error, EOFError) as error:
            raise SourceError(f"{path} is not a PCM WAV file: {error}") from error


def _check(file: wave.Wave_read, path: Path, sample_rate_hz: int) -> None:
    problem = ""
    if file.getframerate() != sample_rate_hz:
        problem = f"has {file.getframerate()} Hz, the loop's source says {sample_rate_hz} Hz: resample the file"
    elif file.getsampwidth() not in {1, 2, 3, 4}:
        problem = f"has {8 * file.getsampwidth()} bits a sample; 8, 16, 24 and 32 are read"
    elif file.getnframes() == 0:
        problem = "has no samples"
    if problem:
        raise SourceError(f"{path} {problem}")
