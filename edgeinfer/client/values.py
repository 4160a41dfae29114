"""Turn what an app has in its hands (arrays, buffers, lists, texts, files) into the tensors of a request.

Pure. numpy arrays are read through their array interface, so numpy is never imported here. What a text or a list
means depends on the model's declared inputs, and so do arrays of numpy's default types (float64, int64), which are
rarely what a model takes; everything else says itself what it is.
"""

from __future__ import annotations

import array
import contextlib
import mimetypes
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from edgeinfer import oip
from edgeinfer.client.answer import Rejected
from edgeinfer.client.memory import SharedTensor
from edgeinfer.errors import ProtocolError
from edgeinfer.plain_file import read_plain
from edgeinfer.request import Payload

TEXT_TYPE = "text/plain; charset=utf-8"
MAX_MEDIUM_BYTES = 64 << 20
"""Of a file; the daemon takes no larger request."""

_ARRAY_TYPES = {
    "b": "INT8", "B": "UINT8", "h": "INT16", "H": "UINT16", "i": "INT32", "I": "UINT32", "q": "INT64", "Q": "UINT64",
    "l": "INT64" if array.array("l").itemsize == 8 else "INT32",
    "L": "UINT64" if array.array("L").itemsize == 8 else "UINT32",
    "e": "FP16", "f": "FP32", "d": "FP64", "?": "BOOL",
}  # fmt: skip
"""Buffer formats (struct codes) to OIP datatypes."""
INTERFACE_TYPES = {
    "b1": "BOOL", "u1": "UINT8", "i1": "INT8", "u2": "UINT16", "i2": "INT16", "u4": "UINT32", "i4": "INT32",
    "u8": "UINT64", "i8": "INT64", "f2": "FP16", "f4": "FP32", "f8": "FP64",
}  # fmt: skip
"""numpy type strings, without byte order, to OIP datatypes."""
_PACK_CODES = {name: code for code, name in _ARRAY_TYPES.items() if code not in "lL"}

Specs = Sequence[Mapping[str, Any]]
"""The model's inputs as its metadata describes them."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input given explicitly: raw little-endian bytes, row-major, of a datatype and shape."""

    datatype: str
    shape: Sequence[int]
    raw: bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Media:
    """An input given as an encoded file: a JPEG, PNG, WAV or text that the model's worker decodes."""

    data: bytes | bytearray | memoryview
    content_type: str


class Unwritable(ProtocolError):
    """An input value that cannot be written as a tensor: the protocol has no words for it."""

    exit_code = 65  # EX_DATAERR


Value = Tensor | Media | str | bytes | Sequence[Any] | Any
"""What an input may be given as; see `Client.infer`."""


def media_of_file(path: Path) -> Media:
    """Return a file as a medium, its content type from its name.

    Raises:
        OSError: it cannot be read, is no plain file, or has more than `MAX_MEDIUM_BYTES`.
    """
    return Media(read_plain(path, MAX_MEDIUM_BYTES), mimetypes.guess_type(path.name)[0] or "application/octet-stream")


def as_text(text: str) -> bytes:
    """Return a text as it is sent.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(text, str):
        raise TypeError(f"infer_text takes a str, not {type(text).__name__}; infer takes numbers, infer_media bytes")
    return text.encode()


def needs_specs(inputs: Mapping[str, Value] | Value) -> bool:
    """Return whether the model's declared inputs have to be known to make tensors of these values."""
    if not isinstance(inputs, Mapping) or not inputs:
        return True
    return any(isinstance(value, str) or _is_plain(value) or _is_default(value) for value in inputs.values())


def make_request(
    model: str,
    inputs: Mapping[str, Value] | Value,
    specs: Specs,
    *,
    outputs: Sequence[str],
    parameters: Mapping[str, Any],
) -> Payload:
    """Return the body of an inference request; `specs` may be empty when `needs_specs` says so.

    Raises:
        Rejected: an input that the model does not have, or none at all.
        Unwritable: a value that cannot be written as a tensor.
    """
    if not isinstance(inputs, Mapping):
        inputs = {only_input(model, specs): inputs}
    if not inputs:
        takes = ", ".join(f"{spec['name']} {spec['datatype']} {list(spec['shape'])}" for spec in specs)
        raise Rejected("input_invalid", f"no input was given; {model} takes {takes}")
    tensors, content_types = [], {}
    for name, given in inputs.items():
        value = given
        if isinstance(given, str) and _spec(model, specs, name).get("parameters", {}).get("decode") == "words":
            value = Media(given.encode(), TEXT_TYPE)
        if isinstance(value, Media):
            content_types[name] = value.content_type
        tensors.append((name, *_encode(model, specs, name, value)))
    payload = oip.encode_request(
        tensors, parameters={"binary_data_output": True, **parameters}, content_types=content_types
    )
    if not outputs:
        return payload
    header = oip.request_header(payload)
    header.outputs = [oip.Tensor(name=name) for name in outputs]
    return Payload(msgspec.json.encode(header), payload.tensors)


def only_input(model: str, specs: Specs) -> str:
    """Return the name of the model's only input.

    Raises:
        Rejected: it has several; the text names them.
    """
    if len(specs) != 1:
        raise Rejected(
            "input_invalid", f"{model} takes {', '.join(str(spec['name']) for spec in specs)}; name the input"
        )
    return str(specs[0]["name"])


def _spec(model: str, specs: Specs, name: str) -> Mapping[str, Any]:
    for spec in specs:
        if spec["name"] == name:
            return spec
    names = ", ".join(str(spec["name"]) for spec in specs)
    raise Rejected("input_invalid", f"there is no input {name!r}; {model} takes {names}")


def _is_plain(value: Value) -> bool:
    """Return whether only the model can say what datatype this is: a list, a number."""
    known = (Tensor, SharedTensor, Media, str, bytes, bytearray, memoryview, array.array)
    return not isinstance(value, known) and not hasattr(value, "__array_interface__")


def _is_default(value: Value) -> bool:
    """Return whether this is an array of a type that numpy chose, and its user perhaps did not."""
    interface = getattr(value, "__array_interface__", None)
    return interface is not None and str(interface["typestr"])[1:] in {"f8", "i8"} and hasattr(value, "astype")


def _encode(model: str, specs: Specs, name: str, value: Value) -> tuple[str, list[int], Any]:
    """Return datatype, shape and raw bytes of an input value."""
    if isinstance(value, SharedTensor) and value.fd < 0:
        raise Unwritable(f"input {name!r}: the shared tensor was closed")
    if isinstance(value, Tensor | SharedTensor):
        return value.datatype, list(value.shape), value.raw
    if isinstance(value, Media):
        if not isinstance(value.data, bytes | bytearray | memoryview):
            raise Unwritable(f"input {name!r}: encoded media are bytes, not {type(value.data).__name__}")
        return "BYTES", [1], oip.bytes_element(value.data)
    if isinstance(value, str):
        return "BYTES", [1], oip.bytes_element(value.encode())
    if (interface := getattr(value, "__array_interface__", None)) is not None:
        if _is_default(value) and specs:
            value = _as_declared(name, value, str(_spec(model, specs, name)["datatype"]))
            interface = value.__array_interface__
        return _from_array(name, value, interface)
    if isinstance(value, bytes | bytearray | memoryview | array.array):
        return _from_buffer(name, memoryview(value))
    return _from_list(name, value, str(_spec(model, specs, name)["datatype"]))


def _as_declared(name: str, value: Any, datatype: str) -> Any:
    """Return a float64 or int64 array in the datatype that the model declares, as a list of its numbers would be.

    Raises:
        Unwritable: more than rounding would be lost.
    """
    typestr = str(value.__array_interface__["typestr"])[1:]
    wanted = next((code for code, known in INTERFACE_TYPES.items() if known == datatype), None)
    if wanted in {None, typestr} or datatype == "BOOL":
        return value
    with contextlib.suppress(AttributeError, TypeError, ValueError, OverflowError):
        lowest, highest = _range(datatype)
        inside = (value >= lowest) & (value <= highest) | (value != value) | (abs(value) == float("inf"))  # noqa: PLR0124
        if (typestr == "i8" or datatype.startswith("FP")) and inside.all():
            return value.astype(f"<{wanted}")
    names = {"f": "float", "i": "int", "u": "uint"}
    have, want = (f"{names[code[0]]}{8 * int(code[1:])}" for code in (typestr, str(wanted)))
    raise Unwritable(
        f"input {name!r}: the model takes {datatype}, and not every number of this {have} array has a place there; "
        f"make it one yourself: .astype('{want}')"
    )


def _range(datatype: str) -> tuple[float, float]:
    """Return the least and the greatest number of a datatype."""
    if datatype.startswith("FP"):
        greatest = {"FP16": 65504.0, "FP32": (2 - 2**-23) * 2.0**127}.get(datatype, sys.float_info.max)
        return -greatest, greatest
    bits = int(datatype.removeprefix("U").removeprefix("INT"))
    return (0, 2**bits - 1) if datatype.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _from_array(name: str, value: Any, interface: Mapping[str, Any]) -> tuple[str, list[int], bytes]:
    """Return a numpy-like array as a tensor, without importing numpy."""
    typestr = str(interface["typestr"])
    datatype = INTERFACE_TYPES.get(typestr[1:])
    if datatype is None:
        if typestr[1:2] in "OUS":
            flat = value.reshape(-1).tolist()
            return (
                "BYTES",
                list(interface["shape"]),
                b"".join(oip.bytes_element(_as_bytes(name, item)) for item in flat),
            )
        raise Unwritable(f"input {name!r}: arrays of type {typestr!r} cannot be sent")
    if typestr[0] == ">" or (typestr[0] == "=" and sys.byteorder == "big"):
        value = value.byteswap()
    return datatype, list(interface["shape"]), value.tobytes()


def _from_buffer(name: str, view: memoryview) -> tuple[str, list[int], bytes | memoryview]:
    code = view.format.lstrip("@=<")
    if code not in _ARRAY_TYPES or (sys.byteorder == "big" and view.itemsize > 1):
        raise Unwritable(f"input {name!r}: a buffer of format {view.format!r} cannot be sent; give a Tensor")
    shape = list(view.shape or [])
    return _ARRAY_TYPES[code], shape, view.cast("B") if view.c_contiguous else view.tobytes()


def _from_list(name: str, value: Any, datatype: str) -> tuple[str, list[int], bytes]:
    """Return a nested list (or a single number) as a tensor of the datatype that the model declares."""
    shape, flat = [], [value]
    while flat and isinstance(flat[0], list | tuple):
        length = len(flat[0])
        if any(not isinstance(row, list | tuple) or len(row) != length for row in flat):
            raise Unwritable(f"input {name!r}: the lists are not all of one length")
        shape.append(length)
        flat = [item for row in flat for item in row]
    if datatype == "BYTES":
        return datatype, shape, b"".join(oip.bytes_element(_as_bytes(name, item)) for item in flat)
    if datatype not in _PACK_CODES:
        raise Unwritable(f"input {name!r}: {datatype} cannot be made from a list; give a Tensor")
    return datatype, shape, _pack(name, flat, datatype)


def _pack(name: str, flat: list[Any], datatype: str) -> bytes:
    try:
        return struct.pack(f"<{len(flat)}{_PACK_CODES[datatype]}", *flat)
    except (struct.error, OverflowError, TypeError) as error:
        raise Unwritable(f"input {name!r}: not all elements are {datatype}: {error}") from error


def _as_bytes(name: str, item: Any) -> bytes:
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, bytes):
        return item
    raise Unwritable(f"input {name!r}: {type(item).__name__} is neither text nor bytes")
