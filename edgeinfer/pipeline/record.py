"""Write what became of one frame as one JSON document, the same for every sink.

Made while the result's memory is held, so that a sink never keeps it. NaN and infinity become null. docs/mqtt.md
describes the fields to whoever reads results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from edgeinfer import oip
from edgeinfer.clock import NS_PER_MS
from edgeinfer.request import Outcome, Result

SMALL_OUTPUT_BYTES = 4 << 10
"""Outputs up to this size are included unless a sink names others."""
LARGEST_OUTPUT_BYTES = 1 << 20
"""Not even a sink that names it gets a larger output: JSON is the wrong form for it."""

_encoder = msgspec.json.Encoder(enc_hook=str)


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a loop hands to its sinks: valid only during the call."""

    loop: str
    frame: str
    """Name of the frame."""
    outcome: Outcome
    stamp: Callable[[], dict[str, Any]]
    """Returns when this is, by which clocks (`at`, `clock_synced`, `boot`, `mono_ns`)."""


def encode_record(delivery: Delivery, outputs: Collection[str] | None) -> bytes:
    """Return the record as one line of JSON, without its end.

    `outputs` names the tensors to include; None means those of at most `SMALL_OUTPUT_BYTES`.
    """
    outcome = delivery.outcome
    record: dict[str, Any] = {
        "loop": delivery.loop,
        "frame": delivery.frame,
        "outcome": outcome.kind.value,
        "reason": outcome.reason,
        "detail": outcome.detail,
        "model": outcome.request.model,
        "placement": outcome.placement.value,
        "latency_ms": _phases(outcome),
        **delivery.stamp(),
    }
    if outcome.result is not None:
        record |= _answer(outcome.result, outputs)
    return _encoder.encode(record)


def _answer(result: Result, outputs: Collection[str] | None) -> dict[str, Any]:
    header = oip.response_header(result.payload)
    included, omitted = {}, []
    for tensor, raw in zip(header.outputs, result.payload.tensors, strict=True):
        size = memoryview(raw).nbytes
        if outputs is not None and tensor.name not in outputs:
            continue
        if size > (SMALL_OUTPUT_BYTES if outputs is None else LARGEST_OUTPUT_BYTES):
            omitted.append(tensor.name)
            continue
        included[tensor.name] = {
            "datatype": tensor.datatype,
            "shape": tensor.shape,
            "data": oip.elements(tensor, raw),
        }
    return {
        "where": result.where,
        "version": result.version,
        "variant": result.variant,
        "digest": result.digest,
        "label": header.parameters.get("label"),
        "score": header.parameters.get("score"),
        "outputs": included,
        "omitted": omitted,
    }


def _phases(outcome: Outcome) -> dict[str, float]:
    """Return how long each phase took, in milliseconds; phases that did not happen are left out."""
    spans = {**outcome.phases_ns, "total": outcome.latency_ns}
    return {phase: round(span / NS_PER_MS, 3) for phase, span in spans.items()}
