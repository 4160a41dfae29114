"""Make the golden requests of a bundle: what the device runs on its own CPU before it trusts a variant.

The requests of a stateful model are one sequence, in order; the others stand alone. The answers are the best variant's;
another variant's tolerance is how far it was from them here, with room for another CPU's rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np

from edgeinfer import oip
from edgeinfer.artifact.manifest import TensorSpec
from edgeinfer.request import Payload
from edgeinfer_tools.faults import DataRefused
from edgeinfer_tools.recipe import Recipe
from edgeinfer_tools.samples import Array, Inputs, Stream, decode_inputs
from edgeinfer_tools.session import Runner

ROOM = 1.5
"""Measured difference to tolerance."""


@dataclass(frozen=True, slots=True)
class GoldenRequest:
    """One request, as it came and decoded, and the answer."""

    inputs: Inputs
    tensors: dict[str, Array]
    answer: dict[str, Array]


def golden_requests(streams: Iterable[Stream], recipe: Recipe, runner: Runner) -> list[GoldenRequest]:
    """Return the first `recipe.file.golden` requests with the answers of `runner`.

    Raises:
        DataRefused: there are no requests.
    """
    found = []
    runner.reset()
    for inputs in islice((request for stream in streams for request in stream.requests), recipe.file.golden):
        tensors = decode_inputs(inputs, recipe.inputs)
        found.append(GoldenRequest(inputs, tensors, runner.run(tensors)))
    if not found:
        raise DataRefused("there is no request to make a golden one of")
    return found


def difference(golden: list[GoldenRequest], runner: Runner) -> float:
    """Return the largest absolute difference of `runner` from the golden answers."""
    largest = 0.0
    runner.reset()
    for item in golden:
        answer = runner.run(item.tensors)
        for name, want in item.answer.items():
            if want.dtype != np.object_ and want.size:
                largest = max(largest, float(np.abs(answer[name].astype(np.float64) - want.astype(np.float64)).max()))
    return largest


def tolerance(least: float, measured: float) -> float:
    """Return the tolerance for a variant that differed by `measured` here, never below the recipe's."""
    return float(f"{max(least, measured * ROOM):.3g}")


def response_payload(item: GoldenRequest, specs: list[TensorSpec], *, model: str, version: str) -> Payload:
    """Return the answer as an OIP body."""
    tensors = [
        (spec.name, spec.datatype, list(item.answer[spec.name].shape), raw_bytes(item.answer[spec.name]))
        for spec in specs
    ]
    return oip.encode_response(tensors, model=model, version=version)


def raw_bytes(array: Array) -> bytes:
    """Return a tensor's OIP bytes: little-endian, row-major; texts each with their length."""
    if array.dtype == np.object_:
        return b"".join(oip.bytes_element(str(item).encode()) for item in array.reshape(-1))
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
