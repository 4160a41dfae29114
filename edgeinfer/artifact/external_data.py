"""Find where an ONNX file keeps its external data, without a runtime, and refuse places outside the bundle.

ONNX Runtime has let `..`, absolute paths and links through in some versions and some ways of loading; a device must
not depend on that. An ONNX file is a protobuf message; this walks only the fields that can hold a tensor (graphs,
nodes, attributes, functions, nested to `MAX_DEPTH`) and skips everything else unread, so it costs no copy of the
weights. It does not judge whether the model is sound otherwise: a file that is no protobuf is refused by name, and what
remains is for the probe in a throw-away worker.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

from edgeinfer.errors import ArtifactError, ManifestInvalid

MAX_DEPTH = 64
MAX_FIELDS = 5_000_000
"""A model of 100,000 nodes has about two million; more is no model but an attempt to keep us busy."""
_BLOCK_BYTES = 4096
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# Message name -> field number -> message name of what the field holds (onnx.proto3).
_CHILDREN = {
    "Model": {7: "Graph", 20: "Training", 25: "Function"},
    "Training": {1: "Graph", 2: "Graph"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "Entry"},
}
_ENTRY_KEY, _ENTRY_VALUE = 1, 2


def check_external_data(path: Path, files: Collection[str], name: PurePosixPath) -> None:
    """Refuse the ONNX file at `path` when it refers to data that is not one of the bundle's `files`.

    `name` is its path inside the bundle; locations are relative to its folder.

    Raises:
        ArtifactError: a location is absolute, leaves the bundle, or is not in the manifest's file table.
        ManifestInvalid: the file is empty or no protobuf.
    """
    for location in sorted(external_locations(path)):
        target = PurePosixPath(location)
        inside = str(name.parent / target)
        if target.is_absolute() or ".." in target.parts or inside not in files:
            raise ArtifactError(
                f"{path} keeps tensors in {location!r}, which is not a file of this bundle; "
                "build the bundle with its external data inside"
            )


def external_locations(path: Path) -> set[str]:
    """Return every external data location that the ONNX file names.

    Raises:
        ManifestInvalid: the file is empty, unreadable or no protobuf.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ManifestInvalid(f"{path} cannot be read: {error.strerror}") from error
    try:
        return set(_locations(_Blocks(descriptor)))
    except ValueError as error:
        raise ManifestInvalid(f"{path} is not an ONNX model: {error}") from error
    except OSError as error:
        raise ManifestInvalid(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


class _Blocks:
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
        offset = at - self._start
        if not 0 <= offset < len(self._block):
            self._start, offset = at, 0
            self._block = os.pread(self._descriptor, _BLOCK_BYTES, at)
            if not self._block:
                raise ValueError(f"it ends at byte {at}")
        return self._block[offset]

    def text(self, start: int, end: int) -> bytes:
        return os.pread(self._descriptor, min(end - start, _BLOCK_BYTES), start)


def _locations(data: _Blocks) -> Iterator[str]:
    """Yield the locations; depth-first with an explicit stack, because the nesting is the file's."""
    if not data.size:
        raise ValueError("it is empty")
    graphs = 0
    stack = [("Model", 0, data.size, 0)]
    while stack:
        message, start, end, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"messages are nested deeper than {MAX_DEPTH}")
        children = _CHILDREN[message]
        for field, wire, at, stop in _fields(data, start, end):
            child = children.get(field)
            if child is None or wire != _BYTES:
                continue
            graphs += message == "Model" and child == "Graph"
            if child == "Entry":
                key, value = _entry(data, at, stop)
                if key == b"location":
                    yield value.decode()
            else:
                stack.append((child, at, stop, depth + 1))
    if not graphs:
        raise ValueError("it has no graph")


def _entry(data: _Blocks, start: int, end: int) -> tuple[bytes, bytes]:
    key = value = b""
    for field, wire, at, stop in _fields(data, start, end):
        if wire == _BYTES and field == _ENTRY_KEY:
            key = data.text(at, stop)
        elif wire == _BYTES and field == _ENTRY_VALUE:
            value = data.text(at, stop)
    return key, value


def _fields(data: _Blocks, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field number, wire type, start, end) of each field of the message in data[start:end]."""
    at = start
    while at < end:
        tag, at = _varint(data, at, end)
        field, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            _, stop = _varint(data, at, end)
        elif wire == _FIXED64:
            stop = at + 8
        elif wire == _FIXED32:
            stop = at + 4
        elif wire == _BYTES:
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


def _varint(data: _Blocks, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data.byte(at)
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError(f"a number at byte {at} does not end")
