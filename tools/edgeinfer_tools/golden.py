"""Make the golden requests of a bundle: what the device runs on its own CPU before it trusts a variant.

Each is one request that stands alone (a stateful model starts it from zeros) with the float variant's answer. A
variant's tolerance is how far it was from that answer here, with room for another CPU's rounding.

File format (docs/bundle.md): 8-byte little-endian length of the JSON header, then the OIP body.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import islice

import numpy as np

from edgeinfer import oip
from edgeinfer.artifact.manifest import TensorSpec
from edgeinfer.request import Payload
from edgeinfer_tools.faults import DataRefused
from edgeinfer_tools.recipe import Recipe
from edgeinfer_tools.samples import Array, Inputs, Media, Stream, decode_inputs
from edgeinfer_tools.session import Runner

ROOM = 1.5
"""Measured difference to tolerance."""


@dataclass(frozen=True, slots=True)
class GoldenRequest:
    """One request, as it came and decoded, and the answer."""

    inputs: Inputs
    tensors: dict[str, Array]
    answer: dict[str, Array]


def golden_requests(streams: list[Stream], recipe: Recipe, runner: Runner) -> list[GoldenRequest]:
    """Return the first `recipe.file.golden` requests with the answers of `runner`.

    Raises:
        DataRefused: there are no requests.
    """
    found = []
    requests = (request for stream in streams for request in stream.requests)
    for inputs in islice(requests, recipe.file.golden):
        tensors = decode_inputs(inputs, recipe.inputs)
        runner.reset()
        found.append(GoldenRequest(inputs, tensors, runner.run(tensors)))
    if not found:
        raise DataRefused("there is no request to make a golden one of")
    return found


def difference(golden: list[GoldenRequest], runner: Runner) -> float:
    """Return the largest absolute difference of `runner` from the golden answers."""
    largest = 0.0
    for item in golden:
        runner.reset()
        answer = runner.run(item.tensors)
        for name, want in item.answer.items():
            if want.dtype != np.object_ and want.size:
                largest = max(largest, float(np.abs(answer[name].astype(np.float64) - want.astype(np.float64)).max()))
    return largest


def tolerance(least: float, measured: float) -> float:
    """Return the tolerance for a variant that differed by `measured` here, never below the recipe's."""
    return float(f"{max(least, measured * ROOM):.3g}")


def request_bytes(item: GoldenRequest, specs: list[TensorSpec]) -> bytes:
    """Return the request as a golden file."""
    tensors, content_types = [], {}
    for spec in specs:
        value = item.inputs[spec.name]
        if isinstance(value, Media):
            content_types[spec.name] = value.content_type
            tensors.append((spec.name, "BYTES", [1], oip.bytes_element(value.data)))
        else:
            tensors.append((spec.name, spec.datatype, list(value.shape), raw_bytes(value)))
    return golden_file(oip.encode_request(tensors, content_types=content_types))


def response_bytes(item: GoldenRequest, specs: list[TensorSpec], *, model: str, version: str) -> bytes:
    """Return the answer as a golden file."""
    tensors = [(spec.name, spec.datatype, list(item.answer[spec.name].shape), raw_bytes(item.answer[spec.name])) for spec in specs]
    return golden_file(oip.encode_response(tensors, model=model, version=version))


def golden_file(payload: Payload) -> bytes:
    """Return header length, header and tensors as one run of bytes."""
    return struct.pack("<Q", len(payload.header)) + oip.join(payload)


def read_golden(data: bytes) -> tuple[memoryview, memoryview]:
    """Return header and body of a golden file."""
    (length,) = struct.unpack_from("<Q", data)
    return oip.split(memoryview(data)[8:], length)


def raw_bytes(array: Array) -> bytes:
    """Return a tensor's OIP bytes: little-endian, row-major; texts each with their length."""
    if array.dtype == np.object_:
        return b"".join(oip.bytes_element(str(item).encode()) for item in array.reshape(-1))
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
