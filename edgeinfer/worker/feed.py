"""Map OIP bodies to numpy arrays and back, inside the contract of one model.

Worker's side. A request's tensors become views of the slot (no copy, when aligned); outputs become the raw buffers of
a response. Also here: the rule about NaN and infinity, for both directions, and the label that the manifest makes of
an output. Decoding media is `decode`'s, running is `session`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from edgeinfer import oip
from edgeinfer.errors import ProtocolError
from edgeinfer.request import Payload
from edgeinfer.worker.decode import decode
from edgeinfer.worker.fault import INPUT_INVALID, Fault

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgeinfer.artifact.manifest import Classes, TensorSpec

NUMPY_TYPES: Final[dict[str, Any]] = {
    "BOOL": np.bool_, "UINT8": np.uint8, "INT8": np.int8, "UINT16": np.uint16, "INT16": np.int16,
    "UINT32": np.uint32, "INT32": np.int32, "UINT64": np.uint64, "INT64": np.int64,
    "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
}  # fmt: skip
"""OIP datatypes with a numpy type. BYTES is an object array of strings; BF16 has none in numpy."""

_OIP_TYPES: Final = {np.dtype(kind): name for name, kind in NUMPY_TYPES.items()}


class InputReader:
    """Reads the requests of one model, request after request. Main thread of the worker only.

    The requests of a caller mostly have the same header, byte for byte, so what it says, and that it keeps the
    contract, is worked out once for as long as the same one comes. What the tensors hold is looked at every time.
    """

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self._specs = specs
        self._header = b""
        self._body_bytes = 0
        self._parsed = oip.RequestHeader([])
        self._views: list[_View] = []

    def read(self, header: bytes, body: memoryview) -> tuple[oip.RequestHeader, dict[str, NDArray[Any]]]:
        """Return the header, to be left as it is, and the arrays of the inputs, as `read_inputs` does."""
        if header != self._header or len(body) != self._body_bytes:
            parsed = oip.request_header(Payload(header))
            feeds = read_inputs(parsed, body, self._specs)
            self._remember(header, parsed, len(body))
            return parsed, feeds
        feeds = {}
        for view in self._views:
            array: NDArray[Any] = np.frombuffer(body, view.kind, view.items, view.offset).reshape(view.shape)
            _check_finite(view.spec, array)
            feeds[view.name] = array
        return self._parsed, feeds

    def _remember(self, header: bytes, parsed: oip.RequestHeader, body_bytes: int) -> None:
        """Keep what is known of a header whose inputs are all views of the body."""
        views: list[_View] = []
        offset = 0
        for tensor in parsed.inputs:
            kind, size = NUMPY_TYPES.get(tensor.datatype), tensor.binary_size or 0
            item_bytes = 0 if kind is None else np.dtype(kind).itemsize
            if kind is None or not size or offset % item_bytes:
                return
            spec = self._specs.get(tensor.name)
            views.append(_View(tensor.name, kind, size // item_bytes, offset, tuple(tensor.shape), spec))
            offset += size
        self._header, self._body_bytes, self._parsed, self._views = header, body_bytes, parsed, views


class _View(NamedTuple):
    """Where one input lies in the body, and as what."""

    name: str
    kind: Any
    items: int
    offset: int
    shape: tuple[int, ...]
    spec: TensorSpec | None


class AnswerHeads:
    """Makes the answers of one model; their heads are encoded anew only when they say something new."""

    def __init__(self, model: str, version: str) -> None:
        self._model = model
        self._version = version
        self._said: object = None
        self._header = b""

    def answer(self, outputs: Mapping[str, NDArray[Any]], parameters: dict[str, Any], request_id: str) -> Payload:
        """Return the answer that says these outputs and parameters; it references the arrays.

        Raises:
            Fault: `output_unsupported`.
        """
        what = ([(name, array.dtype.char, array.shape) for name, array in outputs.items()], parameters, request_id)
        if what == self._said:
            return Payload(self._header, tuple([_bytes_of(array) for array in outputs.values()]))
        raw = [raw_output(name, array) for name, array in outputs.items()]
        payload = oip.encode_response(
            raw, model=self._model, version=self._version, parameters=parameters, request_id=request_id
        )
        if all(datatype != "BYTES" for _, datatype, _, _ in raw):  # whose size isn't told by type and shape
            self._said, self._header = what, payload.header
        return payload


def read_inputs(
    header: oip.RequestHeader, body: memoryview, specs: Mapping[str, TensorSpec]
) -> dict[str, NDArray[Any]]:
    """Return the arrays of a request's inputs; they may be views of `body`.

    An empty `specs` is a bare model: any input is taken as it comes, and ONNX Runtime judges it.

    Raises:
        Fault: `input_invalid`, naming the input, what was expected and what came.
    """
    feeds: dict[str, NDArray[Any]] = {}
    at = 0
    for tensor in header.inputs:
        spec = specs.get(tensor.name)
        if specs and spec is None:
            raise Fault(INPUT_INVALID, f"there is no input {tensor.name!r}; the model takes {', '.join(specs)}")
        size = tensor.binary_size
        if size is None or size < 0 or at + size > len(body):
            raise Fault(INPUT_INVALID, f"input {tensor.name!r} announces {size} bytes, {len(body) - at} are left")
        feeds[tensor.name] = _array(tensor, spec, body[at : at + size])
        at += size
    if missing := [name for name in specs if name not in feeds]:
        raise Fault(INPUT_INVALID, f"input {missing[0]!r} is missing; the model takes {', '.join(specs)}")
    return feeds


def _array(tensor: oip.Tensor, spec: TensorSpec | None, raw: memoryview) -> NDArray[Any]:
    content_type = tensor.parameters.get("content_type")
    try:
        if isinstance(content_type, str) and tensor.datatype == "BYTES" and spec is not None:
            (medium,) = oip.bytes_elements(raw)
            array = decode(spec, content_type, medium)
        else:
            array = tensor_array(tensor, raw)
    except (ValueError, ProtocolError) as error:
        raise Fault(INPUT_INVALID, f"input {tensor.name!r}: {error}") from error
    if spec is not None:
        _check_contract(spec, array)
    _check_finite(spec, array)
    return array


def _check_finite(spec: TensorSpec | None, array: NDArray[Any]) -> None:
    if spec is not None and not spec.allow_non_finite and (count := count_non_finite(array)):
        raise Fault(INPUT_INVALID, f"input {spec.name!r} has {count} values that are NaN or infinite")


def tensor_array(tensor: oip.Tensor, raw: memoryview) -> NDArray[Any]:
    """Return a tensor's array, a view of `raw` where that is aligned.

    Raises:
        ValueError: its bytes do not make its shape, or its datatype has no numpy type.
        ProtocolError: a BYTES tensor whose lengths do not add up.
    """
    if tensor.datatype == "BYTES":
        items = [bytes(item) for item in oip.bytes_elements(raw)]
        array = np.empty(len(items), dtype=object)
        array[:] = [item.decode() for item in items]  # ONNX strings are UTF-8; UnicodeDecodeError is a ValueError
        return array.reshape(tensor.shape)
    if tensor.datatype not in NUMPY_TYPES:
        raise ValueError(f"datatype {tensor.datatype!r} cannot be fed")
    flat: NDArray[Any] = np.frombuffer(raw, NUMPY_TYPES[tensor.datatype])
    return (flat if flat.flags.aligned else flat.copy()).reshape(tensor.shape)


def datatype_of(array: NDArray[Any]) -> str:
    """Return the OIP datatype of an array; BYTES for strings.

    Raises:
        Fault: `output_unsupported`: a type that OIP has no word for.
    """
    if array.dtype.kind in "OUS":
        return "BYTES"
    name = _OIP_TYPES.get(array.dtype)
    if name is None:
        raise Fault("output_unsupported", f"an output of type {array.dtype} has no OIP datatype")
    return name


def _check_contract(spec: TensorSpec, array: NDArray[Any]) -> None:
    datatype = datatype_of(array)
    shape = list(array.shape)
    fits = len(shape) == len(spec.shape) and all(
        dim == want or (want == -1 and dim <= bound)
        for dim, want, bound in zip(shape, spec.shape, spec.bound, strict=True)
    )
    if datatype != spec.datatype or not fits:
        limit = f", at most {spec.max_shape}" if spec.max_shape else ""
        expected = f"{spec.datatype} {spec.shape}{limit}"
        raise Fault(INPUT_INVALID, f"input {spec.name!r} takes {expected}; {datatype} {shape} came")


def count_non_finite(array: NDArray[Any]) -> int:
    """Return how many elements are NaN or infinite.

    The sum of their squares tells the usual case in one pass without memory: it is finite only if they all are. That it
    may overflow is nobody's business: workers have numpy's warnings off.
    """
    kind = array.dtype.char
    if kind in "fd":
        if math.isfinite(np.vdot(array, array)):
            return 0
    elif kind != "e":  # which has no fast product, and overflows soon
        return 0
    return int(array.size - np.count_nonzero(np.isfinite(array)))


def check_outputs(outputs: Mapping[str, NDArray[Any]], specs: Mapping[str, TensorSpec]) -> None:
    """Refuse outputs with NaN or infinity, except where the manifest means them.

    Raises:
        Fault: `non_finite_output`.
    """
    for name, array in outputs.items():
        spec = specs.get(name)
        if (spec is None or not spec.allow_non_finite) and (count := count_non_finite(array)):
            raise Fault(
                "non_finite_output", f"output {name!r} has {count} of {array.size} values that are NaN or infinite"
            )


def raw_output(name: str, array: NDArray[Any]) -> tuple[str, str, list[int], bytes | memoryview]:
    """Return an output as (name, datatype, shape, raw bytes), as `oip.encode_response` takes it."""
    datatype, shape = datatype_of(array), list(array.shape)
    if datatype == "BYTES":
        items = (item if isinstance(item, bytes) else str(item).encode() for item in array.reshape(-1).tolist())
        return name, datatype, shape, b"".join(map(oip.bytes_element, items))
    return name, datatype, shape, _bytes_of(array)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    """Return an array's elements as raw bytes, in order; a view where they lie so."""
    if array.size and array.flags.c_contiguous:
        return array.data.cast("B")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def label(classes: Classes, outputs: Mapping[str, NDArray[Any]]) -> dict[str, str | float]:
    """Return `label` and `score` of an answer, as the manifest's `classes` says.

    Raises:
        Fault: `contract_mismatch`: the output does not have the elements that the labels need.
    """
    scores = outputs[classes.output].reshape(-1)
    needed = 1 if classes.threshold is not None else len(classes.labels)
    if scores.size != needed:
        raise Fault("contract_mismatch", f"output {classes.output!r} has {scores.size} scores for {needed} classes")
    if classes.threshold is not None:
        score = float(scores[0])
        return {"label": classes.labels[int(score >= classes.threshold)], "score": score}
    best = int(scores.argmax())
    return {"label": classes.labels[best], "score": float(scores[best])}


def compare(
    outputs: Mapping[str, NDArray[Any]], header: oip.ResponseHeader, body: memoryview, tolerance: float
) -> tuple[float, str]:
    """Return the largest absolute difference from an expected response, and why they disagree (empty if not)."""
    worst, at = 0.0, 0
    for tensor in header.outputs:
        size = tensor.binary_size or 0
        expected = tensor_array(tensor, body[at : at + size])
        at += size
        got = outputs.get(tensor.name)
        if got is None:
            return float("inf"), f"output {tensor.name!r} is missing"
        if (problem := _shape_problem(tensor, got)) is not None:
            return float("inf"), problem
        difference = _difference(got, expected)
        worst = max(worst, difference)
        if not difference <= tolerance:
            return worst, f"output {tensor.name!r} differs by {difference:.6g}, tolerance is {tolerance:.6g}"
    return worst, ""


def _shape_problem(tensor: oip.Tensor, got: NDArray[Any]) -> str | None:
    datatype, shape = datatype_of(got), list(got.shape)
    if (datatype, shape) == (tensor.datatype, tensor.shape):
        return None
    return f"output {tensor.name!r} is {datatype} {shape}, expected {tensor.datatype} {tensor.shape}"


def _difference(got: NDArray[Any], expected: NDArray[Any]) -> float:
    if got.size == 0:
        return 0.0
    if got.dtype.kind in "OUSb":
        return float(not np.array_equal(got, expected))
    with np.errstate(all="ignore"):
        apart = np.abs(got.astype(np.float64) - expected.astype(np.float64))
    same = got == expected
    if got.dtype.kind == "f":
        same |= np.isnan(got) & np.isnan(expected)  # NaN is right where NaN is expected
    return float(np.where(same, 0.0, np.nan_to_num(apart, nan=np.inf)).max())


def only(outputs: Mapping[str, NDArray[Any]], wanted: Sequence[oip.Tensor]) -> Mapping[str, NDArray[Any]]:
    """Return the outputs that a request asks for; all when it names none.

    Raises:
        Fault: `input_invalid`: it asks for one that there is not.
    """
    if not wanted:
        return outputs
    for tensor in wanted:
        if tensor.name not in outputs:
            raise Fault(INPUT_INVALID, f"there is no output {tensor.name!r}; the model gives {', '.join(outputs)}")
    return {tensor.name: outputs[tensor.name] for tensor in wanted}
