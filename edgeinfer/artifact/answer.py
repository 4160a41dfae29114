"""Decide from a manifest alone whether tensors that came from another machine are an answer of its model.

Pure, and without numpy: it runs in the daemon, on what a peer sent. Names, datatypes, shapes and sizes are always
checked; NaN and infinity are looked for in outputs of at most `MAX_SEARCHED_BYTES`, so that a large output costs
nothing (a worker's own outputs are searched in the worker, whatever their size). What label the scores mean is
computed here again: a label that came along is nobody's business.
"""

from __future__ import annotations

import array
import math
import struct
import sys
from collections.abc import Sequence
from typing import Protocol

from edgeinfer.artifact.contract import LEAST_MEDIUM_BYTES, TensorHeader, describe_spec
from edgeinfer.artifact.manifest import Manifest, TensorSpec
from edgeinfer.datatype import ITEM_BYTES
from edgeinfer.request import Payload

MAX_SEARCHED_BYTES = 64 << 10
"""Largest output in which NaN and infinity are looked for: about a millisecond on a small board."""

Raw = bytes | bytearray | memoryview

_ARRAY_CODE = {
    "BOOL": "B", "UINT8": "B", "INT8": "b", "UINT16": "H", "INT16": "h", "UINT32": "I", "INT32": "i",
    "UINT64": "Q", "INT64": "q", "FP32": "f", "FP64": "d",
}  # fmt: skip
_FLOATS = {"FP16", "BF16", "FP32", "FP64"}


class OutputsHeader(Protocol):
    """A response's header; `oip.ResponseHeader` is one."""

    @property
    def outputs(self) -> Sequence[TensorHeader]:
        """The outputs it describes, in order."""
        ...


def max_answer_bytes(manifest: Manifest) -> int:
    """Most bytes that the tensors of an answer may have; texts are given room beyond the manifest's estimate."""
    return sum(_max_bytes(spec) for spec in manifest.outputs)


def check_outputs(
    manifest: Manifest, header: OutputsHeader, payload: Payload, *, wanted: Sequence[str] = ()
) -> str | None:
    """Return why the response is no answer of the manifest's model, or None when it is.

    `payload` is in all-binary form, its tensors in the header's order. `wanted` are the outputs that were asked for,
    all when empty: an answer has exactly those. The text names the output, what was expected and what came.
    """
    specs = {spec.name: spec for spec in manifest.outputs}
    expected = set(wanted) & set(specs) or set(specs)
    given = [tensor.name for tensor in header.outputs]
    for name in given:
        if name not in expected:
            return f"there is no output {name[:64]!r}; expected are {', '.join(sorted(expected))}"
        if given.count(name) > 1:
            return f"output {name!r} is given {given.count(name)} times"
    if missing := sorted(expected - set(given)):
        return f"output {missing[0]!r} is missing"
    if len(payload.tensors) != len(given):
        return f"{len(given)} outputs are described, {len(payload.tensors)} came"
    for tensor, raw in zip(header.outputs, payload.tensors, strict=True):
        if problem := _check(specs[tensor.name], tensor, raw):
            return f"output {tensor.name!r} {problem}"
    return _check_scores(manifest, header, payload)


def label(manifest: Manifest, header: OutputsHeader, payload: Payload) -> dict[str, str | float]:
    """Return `label` and `score` of an answer that `check_outputs` let pass, as the manifest's `classes` says.

    Nothing when the model has no classes, or the output that they are made of was not asked for.
    """
    classes = manifest.classes
    scores = None if classes is None else _scores(classes.output, header, payload)
    if classes is None or scores is None:
        return {}
    if classes.threshold is not None:
        return {"label": classes.labels[int(scores[0] >= classes.threshold)], "score": float(scores[0])}
    best = max(range(len(scores)), key=scores.__getitem__)
    return {"label": classes.labels[best], "score": float(scores[best])}


def _check(spec: TensorSpec, tensor: TensorHeader, raw: Raw) -> str | None:
    shape, size_bytes = list(tensor.shape), memoryview(raw).nbytes
    fits = len(shape) == len(spec.shape) and all(
        dim == want or (want == -1 and 0 <= dim <= bound)
        for dim, want, bound in zip(shape, spec.shape, spec.bound, strict=True)
    )
    if tensor.datatype != spec.datatype or not fits:
        return f"is {describe_spec(spec)}; {tensor.datatype[:16]} {shape[:16]} came"
    item = ITEM_BYTES.get(spec.datatype)
    if item is None:
        most = _max_bytes(spec)
        return f"has at most {most} bytes, {size_bytes} came" if size_bytes > most else None
    expected = item * math.prod(shape)
    if size_bytes != expected:
        return f"of {spec.datatype} {shape} has {expected} bytes, {size_bytes} came"
    if spec.datatype not in _FLOATS or spec.allow_non_finite or size_bytes > MAX_SEARCHED_BYTES:
        return None
    values = _numbers(spec.datatype, raw)
    if math.isfinite(sum(values)):  # one pass tells the usual case
        return None
    lost = sum(not math.isfinite(value) for value in values)
    return f"has {lost} of {len(values)} values that are NaN or infinite" if lost else None


def _check_scores(manifest: Manifest, header: OutputsHeader, payload: Payload) -> str | None:
    classes = manifest.classes
    scores = None if classes is None else _scores(classes.output, header, payload)
    if classes is None or scores is None:
        return None
    needed = 1 if classes.threshold is not None else len(classes.labels)
    return None if len(scores) == needed else f"output {classes.output!r} has {len(scores)} scores for {needed} classes"


def _scores(output: str, header: OutputsHeader, payload: Payload) -> Sequence[float] | None:
    for tensor, raw in zip(header.outputs, payload.tensors, strict=True):
        if tensor.name == output and tensor.datatype in ITEM_BYTES:
            return _numbers(tensor.datatype, raw)
    return None


def _numbers(datatype: str, raw: Raw) -> Sequence[float]:
    """Return the elements of a tensor of numbers, which are little-endian on every wire."""
    data = bytes(raw)
    if datatype == "FP16":
        return struct.unpack(f"<{len(data) // 2}e", data)
    if datatype == "BF16":  # the upper half of an FP32
        return [value for (pair,) in struct.iter_unpack("2s", data) for value in struct.unpack("<f", b"\0\0" + pair)]
    values = array.array(_ARRAY_CODE[datatype], data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _max_bytes(spec: TensorSpec) -> int:
    return spec.max_bytes if spec.datatype in ITEM_BYTES else max(spec.max_bytes, LEAST_MEDIUM_BYTES)
