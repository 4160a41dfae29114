"""Give the files of a directory as frames: over and over, once, or as they appear.

Files are read in the media thread. A file that is still being written (seen for the first time, or changed since the
last look) waits; hidden files and `.part` or `.tmp` are never taken, so a writer that renames into place is safe.
"""

from __future__ import annotations

import fnmatch
import os
from collections import deque
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.clock import NS_PER_MS, Clock, sleep_until
from edgeinfer.config import DirectorySource
from edgeinfer.errors import mib
from edgeinfer.pipeline.frame import MAX_FRAME_BYTES, Frame, SourceError, SourceSnapshot
from edgeinfer.pipeline.off_thread import off_thread
from edgeinfer.pipeline.regular import open_regular

WATCH_PERIOD_NS = 100 * NS_PER_MS
"""How often a watched directory is looked at: fast enough for people, 1 ms of CPU per second for 1,000 files."""

CONTENT_TYPES = {
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".png": "image/png",
    ".wav": "audio/wav",
    ".txt": "text/plain",
}
"""Content types by suffix; what is not here is sent as it is and refused by models that cannot take it."""


@dataclass(frozen=True, slots=True)
class _Seen:
    stamp: tuple[int, int]
    """Modification time and size: whether it changes, never when it was."""
    first_ns: int
    taken: bool


class DirectoryFrames:
    """A `Source` over a directory's files, in order of name; in `watch` mode the newest of those that came."""

    def __init__(self, section: DirectorySource, *, clock: Clock, storage: Executor) -> None:
        self._section = section
        self._clock = clock
        self._storage = storage
        self._queue: deque[str] = deque()
        self._listed = 0
        self._seen: dict[str, _Seen] | None = None
        self._taken = 0
        self._skipped = 0
        self._problem = ""

    async def run(self) -> None:
        """Nothing goes on beside `next_frame`."""

    async def next_frame(self) -> Frame | None:
        """Return the next file; in `watch` mode, wait for a new one. None when `once` is over.

        Raises:
            SourceError: the directory is missing or has no file that matches and can be read.
        """
        try:
            frame = await (self._watched() if self._section.mode == "watch" else self._replayed())
        except SourceError as error:
            self._problem = str(error)
            raise
        self._problem = ""
        self._taken += frame is not None
        return frame

    def snapshot(self) -> SourceSnapshot:
        """Return how it stands."""
        return SourceSnapshot(self._taken, self._skipped, problem=self._problem)

    async def _replayed(self) -> Frame | None:
        failures = 0
        while True:
            first = not self._queue
            if first:
                if self._listed and self._section.mode == "once":
                    return None
                self._queue.extend(sorted(await off_thread(self._storage, self._list)))
                self._listed = len(self._queue)
                if not self._queue:
                    raise SourceError(f"{self._section.path} has no file that matches {self._section.pattern!r}")
            name = self._queue.popleft()
            try:
                data = await off_thread(self._storage, self._read, name)
            except SourceError:
                self._skipped += 1
                failures += 1
                if failures >= self._listed:
                    raise
            else:
                return self._frame(name, data, self._clock.now_ns(), sequence_start=first)

    async def _watched(self) -> Frame:
        while True:
            now_ns = self._clock.now_ns()
            listed = await off_thread(self._storage, self._list)
            if self._seen is None:  # what is there already is not new
                self._seen = {name: _Seen(stamp, now_ns, taken=True) for name, stamp in listed.items()}
            ready = self._look(listed, now_ns)
            self._skipped += max(0, len(ready) - 1)
            if ready:
                name = max(ready, key=lambda name: (listed[name], name))
                try:
                    data = await off_thread(self._storage, self._read, name)
                except SourceError as error:
                    self._skipped += 1
                    self._problem = str(error)
                else:
                    return self._frame(name, data, self._seen[name].first_ns, sequence_start=True)
            await sleep_until(now_ns + WATCH_PERIOD_NS, self._clock)

    def _look(self, listed: dict[str, tuple[int, int]], now_ns: int) -> list[str]:
        """Compare with the look before; return the new files that have stopped changing, marked as taken."""
        before, ready = self._seen or {}, []
        self._seen = {}
        for name, stamp in listed.items():
            known = before.get(name)
            if known is None or known.stamp != stamp:
                known = _Seen(stamp, now_ns, taken=False)
            elif not known.taken:
                ready.append(name)
                known = _Seen(stamp, known.first_ns, taken=True)
            self._seen[name] = known
        return ready

    def _list(self) -> dict[str, tuple[int, int]]:
        """Return modification time and size of every file that matches. Media thread."""
        found = {}
        try:
            with os.scandir(self._section.path) as entries:
                for entry in entries:
                    hidden = entry.name.startswith(".") or entry.name.endswith((".part", ".tmp"))
                    if hidden or not fnmatch.fnmatch(entry.name, self._section.pattern) or not entry.is_file():
                        continue
                    status = entry.stat()
                    found[entry.name] = (status.st_mtime_ns, status.st_size)
        except OSError as error:
            raise SourceError(f"{self._section.path} cannot be listed: {error.strerror}") from error
        return found

    def _read(self, name: str) -> bytes:
        """Return a file's bytes. Media thread."""
        path = self._section.path / name
        try:
            with open_regular(path) as file:
                data = file.read(MAX_FRAME_BYTES + 1)
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error.strerror}") from error
        if len(data) > MAX_FRAME_BYTES:
            raise SourceError(f"{path} has more than {mib(MAX_FRAME_BYTES)}, which no frame has")
        return data

    def _frame(self, name: str, data: bytes, captured_ns: int, *, sequence_start: bool) -> Frame:
        content_type = CONTENT_TYPES.get(Path(name).suffix.lower(), "application/octet-stream")
        return Frame(data, content_type, captured_ns, name, sequence_start)
