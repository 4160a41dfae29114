"""Measure what a variant costs, in the very worker that a device would run it in.

One throw-away worker per thread count: so loading, decoding, memory and timing are the device's own code
(`worker.costing`), and what is reported means the same on both sides of the manifest. Owns the requests that are
measured with.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgeinfer import oip
from edgeinfer.artifact.manifest import TensorSpec
from edgeinfer.artifact.profile import OperatingCost
from edgeinfer.request import Payload
from edgeinfer.worker.costing import ARENA_MAX_BYTES, measure_spec
from edgeinfer.worker.messages import LoadSpec
from edgeinfer.worker.nursery import Nursery
from edgeinfer.worker.spec import WorkerLimits
from edgeinfer_tools.golden import raw_bytes
from edgeinfer_tools.recipe import Recipe, VariantRecipe
from edgeinfer_tools.samples import NUMPY_TYPES, Array, Inputs, Media

MAX_SLOT_BYTES = 1 << 30


def measure(
    model: Path, *, variant: VariantRecipe, recipe: Recipe, threads: Sequence[int], typical: Inputs, seconds: float
) -> list[OperatingCost]:
    """Return what one variant costs here at each thread count.

    Latency is that of the request `typical`, inside the runtime, in `seconds`; memory is that of loading, running it,
    and running the largest request that the contract allows.

    Raises:
        SessionError: a worker could not load or run it.
    """
    specs = [
        LoadSpec(
            model=recipe.file.name,
            version=recipe.file.version,
            variant=variant.name,
            path=str(model),
            providers=variant.providers,
            provider_options=variant.provider_options,
            intra_threads=count,
            arena_max_bytes=ARENA_MAX_BYTES,
            inputs=recipe.inputs,
            outputs=recipe.outputs,
            state=recipe.state,
            classes=recipe.classes,
        )
        for count in threads
    ]
    requests = request_payload(typical, recipe.inputs), request_payload(largest(typical, recipe.inputs), recipe.inputs)
    return asyncio.run(_measure_all(specs, requests, seconds))


async def _measure_all(specs: list[LoadSpec], requests: tuple[Payload, Payload], seconds: float) -> list[OperatingCost]:
    nursery = Nursery()
    await nursery.start()
    try:
        limits = WorkerLimits(max_slot_bytes=MAX_SLOT_BYTES)
        return [await measure_spec(nursery, spec, *requests, seconds=seconds, limits=limits) for spec in specs]
    finally:
        await nursery.close()


def request_payload(inputs: Inputs, specs: list[TensorSpec]) -> Payload:
    """Return one request as an OIP body: media as they are, tensors raw."""
    tensors, content_types = [], {}
    for spec in specs:
        value = inputs[spec.name]
        if isinstance(value, Media):
            content_types[spec.name] = value.content_type
            tensors.append((spec.name, "BYTES", [1], oip.bytes_element(value.data)))
        else:
            tensors.append((spec.name, spec.datatype, list(value.shape), raw_bytes(value)))
    return oip.encode_request(tensors, content_types=content_types)


def largest(typical: Inputs, specs: list[TensorSpec]) -> dict[str, Array | Media]:
    """Return the largest request that the contract allows; a picture stays a picture, since decoding costs too."""
    return {spec.name: _largest(spec, typical[spec.name]) for spec in specs}


def _largest(spec: TensorSpec, typical: Array | Media) -> Array | Media:
    if isinstance(typical, Media) and spec.decode is not None and spec.decode.kind == "image":
        from PIL import Image

        out = io.BytesIO()
        with Image.open(io.BytesIO(typical.data)) as image:
            image.convert("RGB").resize((spec.bound[2], spec.bound[1])).save(out, "JPEG")
        return Media(out.getvalue(), "image/jpeg")
    if spec.datatype == "BYTES":
        return np.full(spec.bound, "a", dtype=object)
    if isinstance(typical, Media) or typical.size == 0:
        return np.zeros(spec.bound, NUMPY_TYPES[spec.datatype])
    return np.resize(typical, spec.bound)
