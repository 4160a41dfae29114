"""Make the golden requests of a bundle: what the device runs on its own CPU before it trusts a variant.

The requests of a stateful model are one sequence, in order; the others stand alone. Each variant must give its *own*
answers again, so its tolerance has to allow for another CPU's rounding, not for what quantizing cost: that is what the
gates judge. What another CPU may differ by is estimated here, from what this one differs by when it computes the
same in other ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from edgeinfer import oip
from edgeinfer.artifact.manifest import TensorSpec
from edgeinfer.request import Payload
from edgeinfer_tools.faults import DataRefused
from edgeinfer_tools.recipe import Recipe
from edgeinfer_tools.samples import Array, Inputs, Stream, decode_inputs
from edgeinfer_tools.session import Level, Runner

ROOM = 1.5
"""Spread here to tolerance: other CPUs have more ways than these."""
FLOAT_SHARE = 1e-4
"""Least tolerance, as a share of the largest output: a fortieth of one step of 8 bits."""
QUANTIZED_STEPS = 2
"""Least tolerance of a quantized variant, in steps of its outputs' range over 255: an activation that rounds the other
way on another CPU is one step off, and the layers behind it carry that on."""

Answers = list[dict[str, Array]]
"""What each golden request was answered, in order."""
Load = Callable[[Level, int], Runner]
"""Loads the variant at an optimisation level and with a thread count."""
Way = tuple[Level, int]
WAYS: tuple[Way, ...] = (("all", 1), ("all", 2), ("extended", 1), ("basic", 1), ("none", 1))
"""Ways to compute the same. Without the runtime's fusions (`basic`, `none`) sums have another order, and 8-bit values
are computed in float, so that they round elsewhere: as on another CPU, or more so."""


@dataclass(frozen=True, slots=True)
class GoldenRequest:
    """One request, as it came and decoded."""

    inputs: Inputs
    tensors: dict[str, Array]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A variant's golden answers, and how far it strayed from them when computed in other ways."""

    answers: Answers
    spread: float


def golden_requests(streams: Iterable[Stream], recipe: Recipe) -> list[GoldenRequest]:
    """Return the first `recipe.file.golden` requests.

    Raises:
        DataRefused: there are none.
    """
    requests = islice((request for stream in streams for request in stream.requests), recipe.file.golden)
    found = [GoldenRequest(inputs, decode_inputs(inputs, recipe.inputs)) for inputs in requests]
    if not found:
        raise DataRefused("there is no request to make a golden one of")
    return found


def record(golden: Sequence[GoldenRequest], load: Load, *, exact: bool) -> Recorded:
    """Return the answers of a variant, and the largest difference of the other ways to compute them.

    `exact` says whether this CPU's kernels are right for the variant's number range. Where they saturate, the answers
    are those of the graph without optimisation, whose 8-bit values are computed in float.
    """
    reference: Way = ("all", 1) if exact else ("none", 1)
    answers = answer(golden, load(*reference))
    return Recorded(answers, max(spread(answers, answer(golden, load(*way))) for way in WAYS if way != reference))


def answer(golden: Sequence[GoldenRequest], runner: Runner) -> Answers:
    """Return what `runner` answers, from a fresh state."""
    runner.reset()
    return [runner.run(item.tensors) for item in golden]


def spread(answers: Answers, others: Answers) -> float:
    """Return the largest absolute difference between two runs of the golden requests; of texts, none is counted."""
    largest = 0.0
    for want, got in zip(answers, others, strict=True):
        for name, array in want.items():
            if array.dtype != np.object_ and array.size:
                apart = np.abs(got[name].astype(np.float64) - array.astype(np.float64))
                largest = max(largest, float(apart.max()))
    return largest


def tolerance(least: float, spread_here: float, extents: Iterable[tuple[float, float]], *, quantized: bool) -> float:
    """Return the tolerance of a variant, never below the recipe's `least`.

    `extents` are the smallest and the largest value of each float output on the evaluation data.
    """
    bounds = list(extents)
    magnitude = max((max(abs(low), abs(high)) for low, high in bounds), default=0.0)
    found = max(least, FLOAT_SHARE * magnitude, ROOM * spread_here)
    if quantized:
        found = max(found, QUANTIZED_STEPS * max((high - low for low, high in bounds), default=0.0) / 255)
    return float(f"{found:.3g}")


def response_payload(answered: dict[str, Array], specs: list[TensorSpec], *, model: str, version: str) -> Payload:
    """Return an answer as an OIP body."""
    tensors = [
        (spec.name, spec.datatype, list(answered[spec.name].shape), raw_bytes(answered[spec.name])) for spec in specs
    ]
    return oip.encode_response(tensors, model=model, version=version)


def raw_bytes(array: Array) -> bytes:
    """Return a tensor's OIP bytes: little-endian, row-major; texts each with their length."""
    if array.dtype == np.object_:
        return b"".join(oip.bytes_element(str(item).encode()) for item in array.reshape(-1))
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
