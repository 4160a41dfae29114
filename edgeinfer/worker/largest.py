"""Make a request of the largest shapes that a manifest declares, to time what golden requests may not reach.

Daemon's side, pure. Every element is a one: a valid index, a mask that lets through, a number that divides.
"""

from __future__ import annotations

from typing import Final

from edgeinfer.artifact.manifest import Manifest
from edgeinfer.datatype import ITEM_BYTES
from edgeinfer.oip import encode_request
from edgeinfer.request import Payload

MAX_BYTES: Final = 64 << 20
_ONES: Final = {"FP16": b"\x00\x3c", "BF16": b"\x80\x3f", "FP32": b"\x00\x00\x80\x3f", "FP64": b"\0\0\0\0\0\0\xf0\x3f"}
"""One in each floating-point format, little-endian; the others count."""


def has_one_shape(manifest: Manifest) -> bool:
    """Whether every request has the same shapes, those of the golden ones."""
    return all(-1 not in spec.shape and spec.datatype != "BYTES" for spec in manifest.inputs)


def largest_request(manifest: Manifest) -> Payload | None:
    """Return a request with every input at its bound; None when one is text, or it has over `MAX_BYTES`.

    What takes encoded media takes raw tensors as well.
    """
    if any(spec.datatype not in ITEM_BYTES for spec in manifest.inputs):
        return None
    if manifest.max_request_bytes > MAX_BYTES:
        return None
    inputs = []
    for spec in manifest.inputs:
        size = ITEM_BYTES[spec.datatype]
        one = _ONES.get(spec.datatype, (1).to_bytes(size, "little"))
        inputs.append((spec.name, spec.datatype, spec.bound, one * (spec.max_bytes // size)))
    return encode_request(inputs)
