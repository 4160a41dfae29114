"""Cut a stream of bytes into frames. Pure: bytes in, whole frames out, however the stream was chopped up.

Memory is bounded by the largest frame allowed: a stream that breaks its framing is a `FramingError`, after which
nothing of it can be trusted.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Protocol

from edgeinfer.config import CommandSource
from edgeinfer.errors import ProtocolError, mib
from edgeinfer.pipeline.frame import MAX_FRAME_BYTES

_MAX_LINE_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")


class FramingError(ProtocolError):
    """The stream is not framed as it was said to be."""


class Framer(Protocol):
    """Finds the frames of one stream."""

    def feed(self, data: bytes) -> list[bytes]:
        """Take more of the stream and return the frames that are complete now, in order.

        Those that nobody will take may be left out and counted in `skipped`.

        Raises:
            FramingError: the stream breaks its framing.
        """
        ...

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that has not ended; lost when the stream ends here."""
        ...

    @property
    def skipped(self) -> int:
        """Frames that the last `feed` left out, before those that it returned."""
        ...


def make_framer(section: CommandSource, max_frame_bytes: int = MAX_FRAME_BYTES) -> Framer:
    """Return the framer for a command source's `framing`.

    Raises:
        FramingError: the frames would be too large.
    """
    match section.framing:
        case "length":
            return LengthFramer(max_frame_bytes, newest=1)
        case "fixed":
            if section.frame_bytes > max_frame_bytes:
                raise FramingError(
                    f"frame_bytes is {mib(section.frame_bytes)}, at most {mib(max_frame_bytes)} are taken"
                )
            return FixedFramer(section.frame_bytes, newest=1)
        case "jpeg":
            return JpegFramer(max_frame_bytes)
        case _:
            return LineFramer(min(max_frame_bytes, _MAX_LINE_BYTES))


class LengthFramer:
    """Frames after a 4-byte little-endian length each; the `newest` of those that come at once, None: all."""

    def __init__(self, max_frame_bytes: int, *, newest: int | None = None) -> None:
        self._most = max_frame_bytes
        self._newest = newest
        self._buffer = bytearray()
        self.skipped = 0

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that has not ended."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that are complete now."""
        self._buffer += data
        spans, found, at = deque[tuple[int, int]](maxlen=self._newest), 0, 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if length > self._most:
                raise FramingError(f"a frame announces {mib(length)}, at most {mib(self._most)} are taken")
            end = at + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            spans.append((at + _LENGTH.size, end))
            found += 1
            at = end
        frames = [bytes(self._buffer[start:end]) for start, end in spans]
        self.skipped = found - len(frames)
        del self._buffer[:at]
        return frames


class FixedFramer:
    """Frames of one size, such as raw images; the `newest` of those that come at once, None: all."""

    def __init__(self, frame_bytes: int, *, newest: int | None = None) -> None:
        self._size = frame_bytes
        self._newest = newest
        self._buffer = bytearray()
        self.skipped = 0

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that has not ended."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that are complete now."""
        self._buffer += data
        whole = len(self._buffer) // self._size * self._size
        first = 0 if self._newest is None else max(0, whole - self._newest * self._size)
        frames = [bytes(self._buffer[at : at + self._size]) for at in range(first, whole, self._size)]
        self.skipped = first // self._size
        del self._buffer[:whole]
        return frames


class LineFramer:
    """One text a line; empty lines are no frames."""

    skipped = 0

    def __init__(self, max_frame_bytes: int) -> None:
        self._most = max_frame_bytes
        self._buffer = bytearray()

    @property
    def pending_bytes(self) -> int:
        """Bytes of a line that has not ended."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete now, without their ends."""
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        longest = max(map(len, (*lines, rest)))
        if longest > self._most:
            raise FramingError(f"a line has more than {mib(self._most)}")
        self._buffer = rest
        return [bytes(text) for line in lines if (text := line.removesuffix(b"\r"))]


class JpegFramer:
    """JPEG images one after the other (MJPEG), found by their markers.

    The end of an image is the marker FFD9 *after* its scans: segments before them, which may hold a thumbnail with
    an end of its own, are passed by their length. Bytes between images (multipart boundaries, say) are skipped.
    """

    skipped = 0

    def __init__(self, max_frame_bytes: int) -> None:
        self._most = max_frame_bytes
        self._buffer = bytearray()
        self._at = 0
        self._in_scan = False

    @property
    def pending_bytes(self) -> int:
        """Bytes of an image that has not ended."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the images that are complete now."""
        self._buffer += data
        frames = []
        while self._find_start() and self._find_end():
            frames.append(bytes(self._buffer[: self._at]))
            self._forget(self._at)
        if len(self._buffer) > self._most:
            raise FramingError(f"an image has more than {mib(self._most)} and no end")
        return frames

    def _find_start(self) -> bool:
        """Move a start of image to the buffer's beginning; False when there is none yet."""
        if self._at:
            return True
        start = self._buffer.find(b"\xff\xd8\xff")
        if start < 0:
            del self._buffer[: max(0, len(self._buffer) - 2)]  # it may be cut in the middle
            return False
        del self._buffer[:start]
        self._at = 2
        return True

    def _find_end(self) -> bool:
        """Move on through segments and scans; True when `_at` stands behind the end of the image."""
        buffer = self._buffer
        while True:
            if self._in_scan:
                marker = buffer.find(b"\xff", self._at)
                if marker < 0 or marker + 1 >= len(buffer):
                    self._at = len(buffer) if marker < 0 else marker
                    return False
                code = buffer[marker + 1]
                if code == 0xFF:
                    self._at = marker + 1
                    continue
                self._at = marker
                if code == 0 or 0xD0 <= code <= 0xD7:  # a stuffed byte, or a restart marker inside the scan
                    self._at = marker + 2
                    continue
                self._in_scan = False
            if self._at + 4 > len(buffer) and buffer[self._at : self._at + 2] != b"\xff\xd9":
                return False
            if buffer[self._at] != 0xFF:
                self._forget(2)  # not an image after all
                if not self._find_start():
                    return False
                continue
            code = buffer[self._at + 1]
            if code == 0xD9:
                self._at += 2
                return True
            if code == 0xFF:  # fill byte
                self._at += 1
                continue
            length = int.from_bytes(buffer[self._at + 2 : self._at + 4], "big")
            if self._at + 2 + length > len(buffer):
                return False
            self._at += 2 + max(length, 2)
            self._in_scan = code == 0xDA

    def _forget(self, count: int) -> None:
        del self._buffer[:count]
        self._at = 0
        self._in_scan = False
