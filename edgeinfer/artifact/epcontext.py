"""Find compiled contexts (`EPContext` nodes) in a model file, without a runtime, and refuse them.

Such a node carries what an execution provider has compiled, in itself or in a file beside the model: code that the
provider and its driver run as it is. No check of the graph says anything about it, and some of the ways in which it is
loaded have let paths out of the model's folder. So it may come only from somebody whom the device trusts: from a
signed bundle. This version takes it from none yet: every one is refused, wherever a model is met, at
`edgeinfer bundle add`, when a worker loads it, at `edgeinfer try`, and by the toolchain.

A file is walked, as in `external_data`: the walk skips its weights, and costs by the node. The name of an operator also
stands in the file as plain bytes, in ONNX as in ORT format. So where there are many nodes for the size of a file, it is
searched for these bytes first: without them it has none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.artifact.protobuf import BYTES, MAX_DEPTH, Blocks, fields, opened
from edgeinfer.errors import ArtifactError

_OPERATOR = b"EPContext"
_ORT_FORMAT, _ORT_FORMAT_AT = b"ORTM", 4
"""What a file in ORT format (flatbuffers) has at its fifth byte."""
_CHUNK_BYTES = 1 << 20
_FIELDS_PER_MIB = 300
"""[measured] 0.45 ms a MiB to read and search, 0.7 us a field to walk: what gives up here has cost half a search."""
_MOST_SHOWN = 80

# As in `external_data`: message name -> field number -> message name; only what can hold a node.
_CHILDREN = {
    "Model": {7: "Graph", 20: "Training", 25: "Function"},
    "Training": {1: "Graph", 2: "Graph"},
    "Graph": {1: "Node"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {5: "Attribute"},
    "Attribute": {6: "Graph", 11: "Graph"},
}
_NODE_NAME, _NODE_OPERATOR, _NODE_ATTRIBUTE = 3, 4, 5
_ATTRIBUTE_NAME, _ATTRIBUTE_TEXT = 1, 4


class UnsignedContext(ArtifactError):
    """A model brings code that a provider has compiled, and nobody vouches for it."""


@dataclass(frozen=True, slots=True)
class CompiledContext:
    """One `EPContext` node, as far as it says so itself."""

    node: str = ""
    source: str = ""
    """The provider that made it."""
    cache: str = ""
    """The file that holds the code, or its first bytes when it lies in the node."""

    def __str__(self) -> str:
        made = f" made by {self.source}" if self.source else ""
        return f"EPContext node {self.node!r}{made}"


def refuse_compiled_contexts(path: Path) -> None:
    """Refuse the model file at `path` when it holds code that an execution provider has compiled.

    Raises:
        UnsignedContext: it does.
        ManifestInvalid: it cannot be read, or might, and is no ONNX model.
    """
    context = next(compiled_contexts(path), None)
    if context is not None:
        raise UnsignedContext(
            f"{path} holds compiled code ({context}), which the provider's driver runs unchecked; only a signed bundle "
            "could vouch for it, and this version takes it from none yet. Build from the plain ONNX model instead "
            "(without ep.context_enable): the provider compiles it on the device"
        )


def compiled_contexts(path: Path) -> Iterator[CompiledContext]:
    """Yield the `EPContext` nodes of a model in ONNX or ORT format.

    Raises:
        ManifestInvalid: it cannot be read, or might hold some and is no ONNX model.
    """
    with opened(path) as descriptor:
        if os.pread(descriptor, len(_ORT_FORMAT), _ORT_FORMAT_AT) == _ORT_FORMAT:
            if _mentions(descriptor):
                yield CompiledContext("of an ORT format model")
        elif (found := _walked(descriptor)) is not None:
            yield from found
        elif _mentions(descriptor):
            yield from _nodes(Blocks(descriptor))


def _walked(descriptor: int) -> list[CompiledContext] | None:
    """Return what a walk finds; None when a search is cheaper, or the file is no protobuf."""
    data = Blocks(descriptor)
    data.fields_left = data.size * _FIELDS_PER_MIB >> 20
    try:
        return list(_nodes(data))
    except ValueError:
        return None


def _mentions(descriptor: int) -> bool:
    """Whether the operator's name stands anywhere in the file."""
    overlap = len(_OPERATOR) - 1
    buffer, at = bytearray(overlap + _CHUNK_BYTES), 0
    with memoryview(buffer) as view:
        while count := os.preadv(descriptor, [view[overlap:]], at):
            if buffer.find(_OPERATOR, 0, overlap + count) >= 0:
                return True
            at += count
            buffer[:overlap] = buffer[count : count + overlap]
    return False


def _nodes(data: Blocks) -> Iterator[CompiledContext]:
    stack = [("Model", 0, data.size, 0)]
    while stack:
        message, start, end, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"messages are nested deeper than {MAX_DEPTH}")
        children, compiled = _CHILDREN[message], False
        for field, wire, at, stop in fields(data, start, end):
            if wire != BYTES:
                continue
            if message == "Node" and field == _NODE_OPERATOR:
                compiled |= data.text(at, stop) == _OPERATOR  # once is enough: of two names, parsers take the last
            elif (child := children.get(field)) is not None:
                stack.append((child, at, stop, depth + 1))
        if compiled:
            yield _described(data, start, end)


def _described(data: Blocks, start: int, end: int) -> CompiledContext:
    name, texts = "", {}
    for field, wire, at, stop in fields(data, start, end):
        if wire == BYTES and field == _NODE_NAME:
            name = _shown(data.text(at, stop))
        elif wire == BYTES and field == _NODE_ATTRIBUTE:
            key = text = b""
            for inner, inner_wire, inner_at, inner_stop in fields(data, at, stop):
                if inner_wire == BYTES and inner == _ATTRIBUTE_NAME:
                    key = data.text(inner_at, inner_stop)
                elif inner_wire == BYTES and inner == _ATTRIBUTE_TEXT:
                    text = data.text(inner_at, inner_stop)
            texts[key] = _shown(text)
    return CompiledContext(name, texts.get(b"source", ""), texts.get(b"ep_cache_context", ""))


def _shown(text: bytes) -> str:
    """Return what a file says of itself, fit for a message: printable and short."""
    return "".join(c if c.isprintable() else "?" for c in text[:_MOST_SHOWN].decode(errors="replace"))
