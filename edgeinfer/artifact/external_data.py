"""Find where an ONNX file keeps its external data, without a runtime, and refuse places outside the bundle.

ONNX Runtime has let `..`, absolute paths and links through in some versions and some ways of loading; a device must
not depend on that. An ONNX file is a protobuf message; this walks only the fields that can hold a tensor (graphs,
nodes, attributes, functions, nested to `MAX_DEPTH`) and skips everything else unread, so it costs no copy of the
weights. It does not judge whether the model is sound otherwise: a file that is no protobuf is refused by name, and what
remains is for the probe in a throw-away worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

from edgeinfer.artifact.protobuf import BYTES, MAX_DEPTH, Blocks, fields, opened
from edgeinfer.errors import ArtifactError

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
    with opened(path) as descriptor:
        return set(_locations(Blocks(descriptor)))


def _locations(data: Blocks) -> Iterator[str]:
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
        for field, wire, at, stop in fields(data, start, end):
            child = children.get(field)
            if child is None or wire != BYTES:
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


def _entry(data: Blocks, start: int, end: int) -> tuple[bytes, bytes]:
    key = value = b""
    for field, wire, at, stop in fields(data, start, end):
        if wire == BYTES and field == _ENTRY_KEY:
            key = data.text(at, stop)
        elif wire == BYTES and field == _ENTRY_VALUE:
            value = data.text(at, stop)
    return key, value
