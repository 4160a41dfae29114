"""Read and write Open Inference Protocol v2 bodies: the one tensor codec of edgeinfer.

A body is a JSON header followed by the raw little-endian tensors that the header announces with the binary
tensor extension (`parameters.binary_data_size`); `Inference-Header-Content-Length` (an HTTP header, an MQTT
user property, a field of a worker message) says where the JSON ends. The same body travels over the UNIX
socket, MQTT and the worker channel. Tensors that stand in the JSON (`data`) are read too, and turned into raw
bytes once, at the door. Nothing here needs numpy.

An encoded medium (a JPEG, a WAV, a text) is a BYTES tensor of shape [1] with `parameters.content_type`; the
worker decodes it as the manifest says. BYTES elements are each a 4-byte little-endian length and the bytes.

Format: https://github.com/kserve/open-inference-protocol and Triton's binary tensor data extension.
"""

from __future__ import annotations

import array
import itertools
import math
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from edgeinfer.datatype import ITEM_BYTES
from edgeinfer.errors import ProtocolError
from edgeinfer.request import Payload

HEADER_LENGTH = "Inference-Header-Content-Length"

MAX_HEADER_BYTES = 1 << 20
MAX_LISTS = 1 << 14
"""Most lists (brackets, wherever they stand) in a JSON header; 100,000 small ones cost more time than a model run."""
MAX_OBJECTS = 1 << 13
"""Most objects in a JSON header."""
MAX_QUOTES = 1 << 16
"""Most quotation marks in a JSON header: two for each text."""
MAX_TENSORS = 64
MAX_RANK = 8
_AT_A_TIME = 1 << 14
_SMALL_BYTES = 64 << 10
"""What a header of this size may become costs little, whatever it is made of."""

_ARRAY_CODE = {
    "UINT8": "B", "INT8": "b", "UINT16": "H", "INT16": "h", "UINT32": "I", "INT32": "i",
    "UINT64": "Q", "INT64": "q", "FP32": "f", "FP64": "d",
}  # fmt: skip

Parameters = dict[str, Any]


class Tensor(msgspec.Struct, omit_defaults=True):
    """One tensor of the header: what it is, not its bytes."""

    name: str
    datatype: str = ""
    shape: list[int] = []
    parameters: Parameters = {}
    data: Any = None
    """The elements in JSON, nested or flat; empty when they follow the header in binary form."""

    @property
    def binary_size(self) -> int | None:
        """Bytes of its raw form after the header, or None when it stands in the JSON."""
        size = self.parameters.get("binary_data_size")
        return size if isinstance(size, int) and not isinstance(size, bool) else None


class RequestHeader(msgspec.Struct, omit_defaults=True):
    """The JSON part of an inference request."""

    inputs: list[Tensor]
    id: str = ""
    parameters: Parameters = {}
    outputs: list[Tensor] = []


class ResponseHeader(msgspec.Struct, omit_defaults=True):
    """The JSON part of an inference response."""

    outputs: list[Tensor]
    model_name: str = ""
    model_version: str = ""
    id: str = ""
    parameters: Parameters = {}


Header = RequestHeader | ResponseHeader

_LENGTH = struct.Struct("<I")
_encoder = msgspec.json.Encoder()
_request_decoder = msgspec.json.Decoder(RequestHeader)
_response_decoder = msgspec.json.Decoder(ResponseHeader)


def encode_request(
    inputs: Sequence[tuple[str, str, Sequence[int], bytes | bytearray | memoryview]],
    *,
    parameters: Parameters | None = None,
    content_types: dict[str, str] | None = None,
    request_id: str = "",
) -> Payload:
    """Make a request body from (name, datatype, shape, raw little-endian bytes) of each input.

    `content_types` marks encoded media by input name. The buffers are referenced, not copied.
    """
    described = [_describe(name, datatype, shape, raw) for name, datatype, shape, raw in inputs]
    for tensor in described:
        if content_types and tensor.name in content_types:
            tensor.parameters["content_type"] = content_types[tensor.name]
    header = RequestHeader(inputs=described, id=request_id, parameters=parameters or {})
    return Payload(_encoder.encode(header), tuple(raw for _, _, _, raw in inputs))


def encode_response(
    outputs: Sequence[tuple[str, str, Sequence[int], bytes | bytearray | memoryview]],
    *,
    model: str = "",
    version: str = "",
    parameters: Parameters | None = None,
    request_id: str = "",
) -> Payload:
    """Make a response body from (name, datatype, shape, raw bytes) of each output. See `encode_request`."""
    described = [_describe(name, datatype, shape, raw) for name, datatype, shape, raw in outputs]
    header = ResponseHeader(
        outputs=described, model_name=model, model_version=version, id=request_id, parameters=parameters or {}
    )
    return Payload(_encoder.encode(header), tuple(raw for _, _, _, raw in outputs))


def encode_media(name: str, data: bytes | bytearray | memoryview, content_type: str, **parameters: Any) -> Payload:
    """Make a request body that carries one encoded medium for the input `name`."""
    raw = bytes_element(data)
    return encode_request(
        [(name, "BYTES", [1], raw)], parameters=parameters or None, content_types={name: content_type}
    )


def decode_request(header: bytes | memoryview, body: bytes | memoryview = b"") -> tuple[RequestHeader, Payload]:
    """Check a request completely and return its header and its payload in all-binary form.

    The payload's tensors are views of `body` (or fresh bytes, for tensors that stood in the JSON).

    Raises:
        ProtocolError: the body is not a valid OIP request; the text says which tensor, what was expected, what came.
    """
    parsed = parse_request(header)
    return parsed, attach(parsed, body)


def parse_request(header: bytes | bytearray | memoryview) -> RequestHeader:
    """Return a request's header, before its tensors are there.

    Raises:
        ProtocolError: it is none.
    """
    parsed = _parse(header, _request_decoder)
    assert isinstance(parsed, RequestHeader)
    if not parsed.inputs:
        raise ProtocolError("an inference request needs at least one input")
    return parsed


def attach(
    parsed: RequestHeader, body: bytes | bytearray | memoryview, apart: Mapping[str, memoryview] | None = None
) -> Payload:
    """Check the tensors that came with a header, and return the payload; `parsed` describes all-binary form then.

    `apart` are the bytes of inputs that are neither in the header nor in the body, by name.

    Raises:
        ProtocolError: they are not what it announces.
    """
    buffers = _take(parsed.inputs, body, "input", apart or {})
    return Payload(_encoder.encode(parsed), buffers)


def decode_response(header: bytes | memoryview, body: bytes | memoryview = b"") -> tuple[ResponseHeader, Payload]:
    """Check a response completely; as `decode_request`.

    Raises:
        ProtocolError: the body is not a valid OIP response.
    """
    parsed = _parse(header, _response_decoder)
    assert isinstance(parsed, ResponseHeader)
    buffers = _take(parsed.outputs, body, "output")
    return parsed, Payload(_encoder.encode(parsed), buffers)


def request_header(payload: Payload) -> RequestHeader:
    """Return the header of a payload that was checked before."""
    return _request_decoder.decode(payload.header)


def response_header(payload: Payload) -> ResponseHeader:
    """Return the header of a response that was checked before."""
    return _response_decoder.decode(payload.header)


def split(body: bytes | bytearray | memoryview, header_length: int | None) -> tuple[memoryview, memoryview]:
    """Cut a whole body into header and tensors; without a header length it is all JSON.

    Raises:
        ProtocolError: the length does not fit the body.
    """
    view = memoryview(body)
    if header_length is None:
        return view, view[:0]
    if not 0 < header_length <= len(view):
        raise ProtocolError(f"{HEADER_LENGTH} is {header_length}, the body has {len(view)} bytes")
    return view[:header_length], view[header_length:]


def check_header_bytes(header_bytes: int, body_bytes: int) -> None:
    """Check how long a header is said to be, before it is there.

    Raises:
        ProtocolError: the length does not fit the body.
    """
    if not 0 < header_bytes <= body_bytes:
        raise ProtocolError(f"{HEADER_LENGTH} is {header_bytes}, the body has {body_bytes} bytes")


def join(payload: Payload) -> bytes:
    """Return header and tensors as one run of bytes."""
    return b"".join((payload.header, *payload.tensors))


def to_json(payload: Payload) -> bytes:
    """Return a response with its tensors as JSON `data`, for callers that did not ask for binary.

    NaN and infinity become null (JSON has neither); each tensor that had any says so with
    `parameters.non_finite`, the count.
    """
    header = response_header(payload)
    for tensor, raw in zip(header.outputs, payload.tensors, strict=True):
        put_data(tensor, raw)
    return _encoder.encode(header)


def put_data(tensor: Tensor, raw: bytes | bytearray | memoryview) -> None:
    """Have a tensor stand in the JSON, as `to_json` has it."""
    values = elements(tensor, raw)
    if tensor.datatype in {"FP32", "FP64", "FP16"}:
        finite = [value if value - value == 0 else None for value in values]
        if (lost := finite.count(None)) > 0:
            tensor.parameters["non_finite"] = lost
        values = finite
    tensor.parameters.pop("binary_data_size", None)
    tensor.data = values


def elements(tensor: Tensor, raw: bytes | bytearray | memoryview) -> list[Any]:
    """Return a tensor's elements as a flat Python list (strings for BYTES that are UTF-8, else bytes)."""
    if tensor.datatype == "BYTES":
        whole = bytes(raw)
        return [_text_or_bytes(whole[start:end]) for start, end in _element_spans(whole)]
    if tensor.datatype == "BOOL":
        return [bool(value) for value in bytes(raw)]
    if tensor.datatype == "FP16":
        return list(struct.unpack(f"<{memoryview(raw).nbytes // 2}e", raw))
    if tensor.datatype == "BF16":
        halves = bytes(raw)
        wide = bytearray(2 * len(halves))  # the upper half of an FP32 each
        wide[2::4], wide[3::4] = halves[::2], halves[1::2]
        return list(struct.unpack(f"<{len(halves) // 2}f", wide))
    values = array.array(_ARRAY_CODE[tensor.datatype], bytes(raw))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def bytes_element(data: bytes | bytearray | memoryview) -> bytes:
    """Return one BYTES element: its length, then its bytes."""
    return struct.pack("<I", len(data)) + bytes(data)


def bytes_elements(raw: bytes | bytearray | memoryview) -> list[memoryview]:
    """Return views of the elements of a BYTES tensor.

    Raises:
        ProtocolError: the lengths do not add up.
    """
    view = memoryview(raw).cast("B")
    return [view[start:end] for start, end in _element_spans(view)]


def _element_spans(raw: bytes | bytearray | memoryview) -> Iterator[tuple[int, int]]:
    """Yield where each element of a BYTES tensor begins and ends.

    Raises:
        ProtocolError: the lengths do not add up.
    """
    at, size = 0, memoryview(raw).nbytes
    while at < size:
        if at + 4 > size:
            raise ProtocolError(f"a BYTES tensor ends inside a length, at byte {at} of {size}")
        (length,) = _LENGTH.unpack_from(raw, at)
        at += 4
        if at + length > size:
            raise ProtocolError(f"a BYTES element of {length} bytes overruns its tensor of {size} bytes")
        yield at, at + length
        at += length


def _text_or_bytes(item: bytes) -> str | bytes:
    try:
        return item.decode()
    except UnicodeDecodeError:
        return item


def _describe(name: str, datatype: str, shape: Sequence[int], raw: bytes | bytearray | memoryview) -> Tensor:
    size = memoryview(raw).nbytes
    return Tensor(name=name, datatype=datatype, shape=list(shape), parameters={"binary_data_size": size})


def _parse(header: bytes | bytearray | memoryview, decoder: msgspec.json.Decoder[Any]) -> Header:
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"the JSON header has {len(header)} bytes, at most {MAX_HEADER_BYTES} are read")
    if len(header) > _SMALL_BYTES:
        check_plain(header)
    try:
        return decoder.decode(header)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the JSON header is not a valid inference header: {error}") from error


def check_plain(header: bytes | bytearray | memoryview) -> None:
    """Refuse JSON that would become too many objects, before it becomes any.

    Raises:
        ProtocolError: it has too many lists or objects.
    """
    raw = bytes(header)
    for sign, most, what in (
        (b"[", MAX_LISTS, "lists"), (b"{", MAX_OBJECTS, "objects"), (b'"', MAX_QUOTES, "quotation marks"),
    ):  # fmt: skip
        if (found := raw.count(sign)) > most:
            raise ProtocolError(
                f"the JSON header has {found} {what}, at most {most} are read; "
                "send data as one flat list, or in binary form"
            )


def _take(
    tensors: list[Tensor],
    body: bytes | bytearray | memoryview,
    role: str,
    apart: Mapping[str, memoryview] = MappingProxyType({}),
) -> tuple[bytes | memoryview, ...]:
    """Return each tensor's raw bytes, in order, having checked names, types, shapes and sizes."""
    if len(tensors) > MAX_TENSORS:
        raise ProtocolError(f"{len(tensors)} {role}s, at most {MAX_TENSORS} are taken")
    view, at, buffers = memoryview(body).cast("B"), 0, []
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise ProtocolError(f"{role} {tensor.name!r} is given twice")
        seen.add(tensor.name)
        count = _element_count(tensor, role)
        size = tensor.binary_size
        raw: bytes | memoryview
        if tensor.data is not None:
            raw = _from_json(tensor, count, role)
        elif tensor.name in apart:
            raw = apart[tensor.name]
        elif size is None:
            raise ProtocolError(f"{role} {tensor.name!r} has neither data nor parameters.binary_data_size")
        elif size < 0 or at + size > len(view):
            raise ProtocolError(f"{role} {tensor.name!r} announces {size} bytes, {len(view) - at} are left in the body")
        else:
            raw = view[at : at + size]
            at += size
        _check_size(tensor, raw, count, role)
        tensor.data = None
        tensor.parameters["binary_data_size"] = memoryview(raw).nbytes
        buffers.append(raw)
    if at != len(view):
        raise ProtocolError(f"{len(view) - at} bytes after the last {role}")
    return tuple(buffers)


def _element_count(tensor: Tensor, role: str) -> int:
    if tensor.datatype != "BYTES" and tensor.datatype not in ITEM_BYTES:
        known = ", ".join([*ITEM_BYTES, "BYTES"])
        raise ProtocolError(f"{role} {tensor.name!r} has datatype {tensor.datatype!r}; known are {known}")
    if len(tensor.shape) > MAX_RANK or any(not 0 <= dim <= 1 << 40 for dim in tensor.shape):
        raise ProtocolError(f"{role} {tensor.name!r} has an impossible shape {tensor.shape}")
    count = 1
    for dim in tensor.shape:
        count *= dim
    return count


def _check_size(tensor: Tensor, raw: bytes | memoryview, count: int, role: str) -> None:
    size = memoryview(raw).nbytes
    if tensor.datatype == "BYTES":
        if (got := sum(1 for _ in _element_spans(raw))) != count:
            raise ProtocolError(f"{role} {tensor.name!r} of shape {tensor.shape} has {got} elements, not {count}")
    elif size != (expected := count * ITEM_BYTES[tensor.datatype]):
        raise ProtocolError(
            f"{role} {tensor.name!r}, {tensor.datatype} {tensor.shape}, needs {expected} bytes, {size} came"
        )


def _from_json(tensor: Tensor, count: int, role: str) -> bytes:
    """Return the raw bytes of a tensor whose elements stand in the JSON, nested or flat."""
    kind: Any = int if tensor.datatype.startswith(("INT", "UINT")) else float
    try:
        leaves = _flatten(tensor.data)
        if len(leaves) != count:
            raise ProtocolError(
                f"{role} {tensor.name!r} of shape {tensor.shape} has {len(leaves)} elements, not {count}"
            )
        if tensor.datatype == "BYTES":
            return b"".join(bytes_element(item.encode()) for item in msgspec.convert(leaves, list[str]))
        if tensor.datatype == "BOOL":
            return bytes(msgspec.convert(leaves, list[bool]))
        if tensor.datatype == "FP16":
            return b"".join(struct.pack(f"<{len(part)}e", *part) for part in _converted(leaves, float))
        if tensor.datatype == "BF16":
            raise ProtocolError(f"{role} {tensor.name!r}: BF16 travels in binary form only")
        values = array.array(_ARRAY_CODE[tensor.datatype])
        for part in _converted(leaves, kind):
            values.fromlist(part)
    except (msgspec.MsgspecError, OverflowError, struct.error, UnicodeEncodeError, RecursionError) as error:
        raise ProtocolError(f"{role} {tensor.name!r} has data that is not {tensor.datatype}: {error}") from error
    if tensor.datatype == "FP32" and any(map(math.isinf, values)):  # JSON has no infinity: it was finite there
        raise ProtocolError(f"{role} {tensor.name!r} has data that is not FP32: a number beyond single precision")
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _converted(leaves: list[Any], kind: Any) -> Iterator[list[Any]]:
    """Yield all leaves as numbers of that kind, some at a time: each is an object of 24 bytes meanwhile."""
    for at in range(0, len(leaves), _AT_A_TIME):
        yield msgspec.convert(leaves[at : at + _AT_A_TIME], list[kind])


def _flatten(value: Any) -> Any:
    """Return the leaves of nested lists, in order, level by level (the nesting is the sender's).

    Lists and leaves side by side are left as they are, for the conversion to refuse.
    """
    if not isinstance(value, list):
        return [value]
    while value and isinstance(value[0], list) and set(map(type, value)) == {list}:
        value = list(itertools.chain.from_iterable(value))
    return value
