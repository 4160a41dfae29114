"""Decide from a manifest alone whether a request can be run: names, datatypes, shapes, sizes, media.

Pure: it looks at the header and at the tensors' sizes, never at their elements, so it costs microseconds and decodes
nothing. What only decoding can tell (a broken JPEG, NaN in a tensor) the worker finds. The gateway, the loops and the
nearby service all ask here, so a request that one of them lets in no other refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from edgeinfer.artifact.manifest import Manifest, TensorSpec
from edgeinfer.datatype import ITEM_BYTES
from edgeinfer.request import Payload, Reason, Refusal

LEAST_MEDIUM_BYTES = 1 << 16
"""Room for an encoded medium whatever its decoded size: headers and metadata of small ones."""

CONTENT_TYPES: Mapping[str, tuple[str, ...]] = {
    "image": ("image/jpeg", "image/png"),
    "audio": ("audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave"),
    "words": ("text/plain",),
}
"""Content types that each kind of `decode` takes."""


class TensorHeader(Protocol):
    """What the header says of one tensor; `oip.Tensor` is one."""

    @property
    def name(self) -> str:
        """Name of the tensor."""
        ...

    @property
    def datatype(self) -> str:
        """OIP datatype."""
        ...

    @property
    def shape(self) -> Sequence[int]:
        """Its dimensions."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Its parameters, `content_type` among them."""
        ...


class InputsHeader(Protocol):
    """A request's header; `oip.RequestHeader` is one."""

    @property
    def inputs(self) -> Sequence[TensorHeader]:
        """The inputs it describes, in order."""
        ...


def check_inputs(manifest: Manifest, header: InputsHeader, payload: Payload) -> Refusal | None:
    """Return why the request does not fit the manifest's inputs, or None when it does.

    `payload` is in all-binary form, its tensors in the header's order. The text names the input, what was expected
    and what came.
    """
    specs = {spec.name: spec for spec in manifest.inputs}
    given = [tensor.name for tensor in header.inputs]
    for name in given:
        if name not in specs:
            return _refuse(f"there is no input {name!r}; {manifest.name} takes {', '.join(specs)}")
        if given.count(name) > 1:
            return _refuse(f"input {name!r} is given {given.count(name)} times")
    if missing := [name for name in specs if name not in given]:
        return _refuse(f"input {missing[0]!r} is missing; {manifest.name} takes {', '.join(specs)}")
    if len(payload.tensors) != len(given):
        return _refuse(f"{len(given)} inputs are described, {len(payload.tensors)} came")
    for tensor, raw in zip(header.inputs, payload.tensors, strict=True):
        if problem := _check(specs[tensor.name], tensor, memoryview(raw).nbytes):
            return _refuse(f"input {tensor.name!r} {problem}")
    return None


def check_shapes(manifest: Manifest, header: InputsHeader) -> Refusal | None:
    """Return why a request does not fit, as far as datatypes and shapes of its tensors tell, before they are there."""
    specs = {spec.name: spec for spec in manifest.inputs}
    for tensor in header.inputs:
        spec = specs.get(tensor.name)
        if spec is None or (tensor.datatype == "BYTES" and tensor.parameters.get("content_type")):
            continue
        if problem := _misfit(spec, tensor):
            return _refuse(f"input {tensor.name!r} {problem}")
    return None


def max_medium_bytes(spec: TensorSpec) -> int:
    """Most bytes that an encoded medium for this input may have."""
    return max(spec.max_bytes, LEAST_MEDIUM_BYTES)


def _check(spec: TensorSpec, tensor: TensorHeader, size_bytes: int) -> str | None:
    content_type = tensor.parameters.get("content_type")
    if tensor.datatype == "BYTES" and isinstance(content_type, str) and content_type:
        return _check_medium(spec, content_type, list(tensor.shape), size_bytes)
    if problem := _misfit(spec, tensor):
        return problem
    item = ITEM_BYTES.get(spec.datatype)
    if item is None:
        most = max(spec.max_bytes, LEAST_MEDIUM_BYTES)
        return f"takes at most {most} bytes, {size_bytes} came" if size_bytes > most else None
    expected = item
    for dim in tensor.shape:
        expected *= dim
    if size_bytes == expected:
        return None
    return f"of {spec.datatype} {list(tensor.shape)} has {expected} bytes, {size_bytes} came"


def _misfit(spec: TensorSpec, tensor: TensorHeader) -> str | None:
    shape = list(tensor.shape)
    if tensor.datatype == spec.datatype and _fits(spec, shape):
        return None
    media = f", or {' or '.join(CONTENT_TYPES[spec.decode.kind][:2])}" if spec.decode else ""
    return f"takes {describe_spec(spec)}{media}; {tensor.datatype} {shape} came"


def _check_medium(spec: TensorSpec, content_type: str, shape: list[int], size_bytes: int) -> str | None:
    if spec.decode is None:
        return f"takes {describe_spec(spec)}, no encoded media; {content_type} came"
    accepted = CONTENT_TYPES[spec.decode.kind]
    if content_type.partition(";")[0].strip().lower() not in accepted:
        return f"takes {' or '.join(accepted[:2])}; {content_type} came"
    if shape != [1]:
        return f"takes one encoded medium, shape [1]; shape {shape} came"
    if size_bytes > max_medium_bytes(spec):
        return f"takes media of at most {max_medium_bytes(spec)} bytes; {size_bytes} came"
    return None


def _fits(spec: TensorSpec, shape: list[int]) -> bool:
    least = (
        0 if spec.datatype == "BYTES" else 1
    )  # a text may have no words; an image or a batch of nothing fails in a run
    return len(shape) == len(spec.shape) and all(
        dim == want or (want == -1 and least <= dim <= bound)
        for dim, want, bound in zip(shape, spec.shape, spec.bound, strict=True)
    )


def describe_spec(spec: TensorSpec) -> str:
    """Return an input's or output's datatype and shape with its bound, for people."""
    bound = f" up to {spec.max_shape}" if spec.max_shape else ""
    return f"{spec.datatype} {spec.shape}{bound}"


def _refuse(detail: str) -> Refusal:
    return Refusal(Reason.INPUT_INVALID, detail)
