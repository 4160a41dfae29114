"""Walk a protobuf message in a file: fields by number, block by block, bounded; no schema, no copy of what is skipped.

What the fields mean is the caller's: `external_data` and `epcontext` look into ONNX files with it. A file that is no
protobuf is a ValueError that says where; a card that fails to read is an OSError.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgeinfer.errors import ManifestInvalid

MAX_DEPTH = 64
MAX_FIELDS = 5_000_000
"""A model of 100,000 nodes has about two million; more is no model but an attempt to keep us busy."""
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types."""
_BLOCK_BYTES = 4096


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open an ONNX file for reading, never following a link nor waiting on a pipe; translate what goes wrong inside.

    Raises:
        ManifestInvalid: it cannot be read, or the block raised ValueError: it is no ONNX model.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ManifestInvalid(f"{path} cannot be read: {error.strerror}") from error
    try:
        yield descriptor
    except ValueError as error:
        raise ManifestInvalid(f"{path} is not an ONNX model: {error}") from error
    except OSError as error:
        raise ManifestInvalid(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


class Blocks:
    """A file read block by block where it is looked at.

    Not mapped: on a failing card a mapped page that cannot be read is SIGBUS, a read that fails is an OSError.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._start = 0
        self._block = b""
        self.size = os.fstat(descriptor).st_size
        self.fields_left = MAX_FIELDS

    def byte(self, at: int) -> int:
        """Return one byte of the file."""
        offset = at - self._start
        if not 0 <= offset < len(self._block):
            self._start, offset = at, 0
            self._block = os.pread(self._descriptor, _BLOCK_BYTES, at)
            if not self._block:
                raise ValueError(f"it ends at byte {at}")
        return self._block[offset]

    def text(self, start: int, end: int) -> bytes:
        """Return the first bytes of data[start:end], one block at most."""
        return os.pread(self._descriptor, min(end - start, _BLOCK_BYTES), start)


def fields(data: Blocks, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field number, wire type, start, end) of each field of the message in data[start:end]."""
    at = start
    while at < end:
        tag, at = _varint(data, at, end)
        if tag >> 32:  # other parsers cut such a tag to 32 bits, and would see a field where this one sees none
            raise ValueError(f"a field number at byte {at} has more than 32 bits")
        field, wire = tag >> 3, tag & 7
        if wire == VARINT:
            _, stop = _varint(data, at, end)
        elif wire == FIXED64:
            stop = at + 8
        elif wire == FIXED32:
            stop = at + 4
        elif wire == BYTES:
            length, at = _varint(data, at, end)
            stop = at + length
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if field == 0 or stop > end:
            raise ValueError(f"a field at byte {at} overruns its message")
        data.fields_left -= 1
        if data.fields_left < 0:
            raise ValueError(f"it has more than {MAX_FIELDS} fields")
        yield field, wire, at, stop
        at = stop


def _varint(data: Blocks, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data.byte(at)
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError(f"a number at byte {at} does not end")
