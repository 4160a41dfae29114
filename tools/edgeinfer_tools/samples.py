"""What a recipe's data.py hands over: requests as the device would get them.

A `Stream` is a run of requests that belong together: one for an ordinary model, many in order for a stateful one.
An input is either its tensor or an encoded medium (`Media`), which is decoded as the manifest says, by the
worker's own code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.artifact.manifest import TensorSpec
from edgeinfer.worker.decode import decode
from edgeinfer.worker.fault import Fault
from edgeinfer_tools.faults import DataRefused

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Media:
    """One encoded medium."""

    data: bytes
    content_type: str


@dataclass(frozen=True, slots=True)
class Detection:
    """One object in a picture, in pixels or any other unit that truth and answers share."""

    label: str
    left: float
    top: float
    right: float
    bottom: float
    score: float = 1.0


Inputs = Mapping[str, "Array | Media"]
"""One request: every public input by name."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests in order, sharing state; `label` is the truth about them, where there is one."""

    name: str
    requests: Iterable[Inputs]
    label: str = ""
    truth: Any = None
    """Other truth about each request of the stream: a list of `Detection`, or the tokens that come next."""


NUMPY_TYPES: dict[str, type[Any]] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT8": np.int8,
    "UINT16": np.uint16,
    "INT16": np.int16,
    "FP16": np.float16,
    "UINT32": np.uint32,
    "INT32": np.int32,
    "FP32": np.float32,
    "UINT64": np.uint64,
    "INT64": np.int64,
    "FP64": np.float64,
    "BYTES": np.object_,
}
"""NumPy scalar type of every OIP datatype that NumPy knows."""


def decode_inputs(inputs: Inputs, specs: list[TensorSpec]) -> dict[str, Array]:
    """Return the tensors of one request, decoded and checked against the contract.

    Raises:
        DataRefused: an input is missing, unknown, or not of the declared type or shape.
    """
    if set(inputs) != {spec.name for spec in specs}:
        wanted = ", ".join(spec.name for spec in specs)
        raise DataRefused(f"a sample has inputs {', '.join(sorted(inputs))}; the contract has {wanted}")
    tensors = {}
    for spec in specs:
        value = inputs[spec.name]
        array = decode_media(value, spec) if isinstance(value, Media) else np.asarray(value)
        _check(array, spec)
        tensors[spec.name] = array
    return tensors


def decode_media(media: Media, spec: TensorSpec) -> Array:
    """Return the tensor that an encoded medium stands for, decoded by the worker's own code.

    Raises:
        DataRefused: the input takes no media, or this one cannot be decoded.
    """
    try:
        return decode(spec, media.content_type, memoryview(media.data))
    except Fault as fault:
        raise DataRefused(fault.detail) from fault


def _check(array: Array, spec: TensorSpec) -> None:
    wanted = NUMPY_TYPES[spec.datatype]
    if array.dtype != wanted:
        raise DataRefused(
            f"input {spec.name!r} is {spec.datatype}, a sample has {array.dtype}; use .astype(np.{wanted.__name__})"
        )
    fits = len(array.shape) == len(spec.shape) and all(
        (got == dim) if dim >= 0 else got <= bound
        for got, dim, bound in zip(array.shape, spec.shape, spec.bound, strict=True)
    )
    if not fits:
        raise DataRefused(
            f"input {spec.name!r} has shape {spec.shape} up to {spec.bound}, a sample has {list(array.shape)}"
        )
