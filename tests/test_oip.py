from __future__ import annotations

import contextlib
import json
import math
import struct
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer import oip
from edgeinfer.datatype import ITEM_BYTES
from edgeinfer.errors import ProtocolError
from edgeinfer.request import Payload

NUMPY = {
    "BOOL": np.bool_, "UINT8": np.uint8, "INT8": np.int8, "UINT16": np.uint16, "INT16": np.int16, "FP16": np.float16,
    "UINT32": np.uint32, "INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "INT64": np.int64,
    "FP64": np.float64,
}  # fmt: skip


def _body(payload: Payload) -> bytes:
    return b"".join(map(bytes, payload.tensors))


# --- round trips

shapes = st.lists(st.integers(0, 4), max_size=4)
datatypes = st.sampled_from([*ITEM_BYTES, "BYTES"])


@st.composite
def raw_tensors(draw: st.DrawFn) -> tuple[str, str, list[int], bytes]:
    datatype, shape = draw(datatypes), draw(shapes)
    count = math.prod(shape)
    if datatype == "BYTES":
        raw = b"".join(oip.bytes_element(draw(st.binary(max_size=8))) for _ in range(count))
    else:
        size = count * ITEM_BYTES[datatype]
        raw = draw(st.binary(min_size=size, max_size=size))
    return draw(st.text(max_size=5)), datatype, shape, raw


tensor_lists = st.lists(raw_tensors(), min_size=1, max_size=4, unique_by=lambda tensor: tensor[0])


@given(tensor_lists)
def test_a_request_comes_back_as_it_was_made(tensors: list[tuple[str, str, list[int], bytes]]) -> None:
    made = oip.encode_request(tensors, parameters={"deadline_ms": 40.5}, request_id="r")
    header, payload = oip.decode_request(*oip.split(oip.join(made), len(made.header)))
    assert payload.header == made.header
    assert [bytes(raw) for raw in payload.tensors] == [raw for _, _, _, raw in tensors]
    assert [(tensor.name, tensor.datatype, tensor.shape) for tensor in header.inputs] == [
        (name, datatype, shape) for name, datatype, shape, _ in tensors
    ]
    assert (header.parameters, header.id) == ({"deadline_ms": 40.5}, "r")
    assert oip.request_header(payload) == header
    assert payload.size_bytes == len(oip.join(payload))


@given(tensor_lists)
def test_a_response_comes_back_as_it_was_made(tensors: list[tuple[str, str, list[int], bytes]]) -> None:
    made = oip.encode_response(tensors, model="m", version="1.0.0", parameters={"label": "x"}, request_id="r")
    header, payload = oip.decode_response(*oip.split(oip.join(made), len(made.header)))
    assert [bytes(raw) for raw in payload.tensors] == [raw for _, _, _, raw in tensors]
    assert (header.model_name, header.model_version, header.id) == ("m", "1.0.0", "r")
    assert oip.response_header(payload) == header


@pytest.mark.parametrize("datatype", NUMPY)
def test_elements_are_what_numpy_reads(datatype: str) -> None:
    values: Any = np.array([0, 1, 2, 100], dtype=NUMPY[datatype])
    tensor = oip.Tensor(name="x", datatype=datatype, shape=[4])
    assert oip.elements(tensor, values.tobytes()) == values.tolist()
    assert oip.elements(tensor, memoryview(values.tobytes())) == values.tolist()


def test_bfloat16_is_the_upper_half_of_float32() -> None:
    raw = struct.pack("<f", 1.5)[2:] + struct.pack("<f", -2.0)[2:]
    assert oip.elements(oip.Tensor(name="x", datatype="BF16", shape=[2]), raw) == [1.5, -2.0]


@pytest.mark.parametrize("datatype", [*NUMPY, "BYTES"])
def test_json_and_binary_form_mean_the_same(datatype: str) -> None:
    special: dict[str, Any] = {"BOOL": [True, False, True, True], "BYTES": ["a", "", "ü", "日本"]}
    values = special.get(datatype, [0, 1, 2, 100])
    body = {"inputs": [{"name": "x", "datatype": datatype, "shape": [2, 2], "data": [values[:2], values[2:]]}]}
    header, payload = oip.decode_request(json.dumps(body).encode())
    assert oip.elements(header.inputs[0], payload.tensors[0]) == values
    assert header.inputs[0].binary_size == memoryview(payload.tensors[0]).nbytes
    assert oip.decode_request(payload.header, _body(payload))[1].header == payload.header
    response = oip.encode_response([("x", datatype, [2, 2], payload.tensors[0])])
    assert json.loads(oip.to_json(response))["outputs"][0]["data"] == values


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_byte_elements_come_back(items: list[bytes]) -> None:
    raw = b"".join(map(oip.bytes_element, items))
    assert [bytes(item) for item in oip.bytes_elements(raw)] == items


def test_media_are_one_element_with_their_content_type() -> None:
    payload = oip.encode_media("image", b"\xff\xd8", "image/jpeg", deadline_ms=5)
    header, decoded = oip.decode_request(payload.header, _body(payload))
    assert (header.inputs[0].datatype, header.inputs[0].shape) == ("BYTES", [1])
    assert header.inputs[0].parameters["content_type"] == "image/jpeg"
    assert header.parameters == {"deadline_ms": 5}
    assert bytes(oip.bytes_elements(decoded.tensors[0])[0]) == b"\xff\xd8"


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "FP16"])
def test_what_json_cannot_say_is_null_and_counted(datatype: str) -> None:
    code = {"FP16": "e", "FP32": "f", "FP64": "d"}[datatype]
    raw = struct.pack(f"<4{code}", 1.0, math.nan, math.inf, -math.inf)
    output = json.loads(oip.to_json(oip.encode_response([("y", datatype, [4], raw)])))["outputs"][0]
    assert output["data"] == [1.0, None, None, None]
    assert output["parameters"] == {"non_finite": 3}


def test_tensors_are_views_not_copies() -> None:
    body = bytearray(b"\1\2\3\4")
    made = oip.encode_request([("x", "UINT8", [4], b"\0" * 4)])
    _, payload = oip.decode_request(made.header, memoryview(body))
    body[0] = 9
    assert bytes(payload.tensors[0]) == b"\x09\2\3\4"


# --- what is refused, and how


def _tensor(**fields: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "UINT8", "shape": [2], "parameters": {"binary_data_size": 2}, **fields}


WRONG: dict[str, tuple[Any, bytes, str]] = {
    "no JSON": (b"<html>", b"", "not a valid inference header"),
    "no object": (b"[]", b"", "not a valid inference header"),
    "no inputs": ({}, b"", "missing required field `inputs`"),
    "no input": ({"inputs": []}, b"", "at least one input"),
    "no name": ({"inputs": [{"datatype": "FP32"}]}, b"", "missing required field `name`"),
    "unknown datatype": ({"inputs": [_tensor(datatype="FP8")]}, b"12", "datatype 'FP8'; known are BOOL"),
    "negative dimension": ({"inputs": [_tensor(shape=[-1])]}, b"12", r"impossible shape \[-1\]"),
    "absurd dimension": ({"inputs": [_tensor(shape=[1 << 60])]}, b"12", "impossible shape"),
    "absurd rank": ({"inputs": [_tensor(shape=[1] * 9)]}, b"12", "impossible shape"),
    "a dimension that is none": ({"inputs": [_tensor(shape=[1.5])]}, b"12", "not a valid inference header"),
    "given twice": ({"inputs": [_tensor(), _tensor()]}, b"1212", "input 'x' is given twice"),
    "too short": ({"inputs": [_tensor()]}, b"1", "announces 2 bytes, 1 are left"),
    "too long": ({"inputs": [_tensor()]}, b"123", "1 bytes after the last input"),
    "size against shape": ({"inputs": [_tensor(shape=[3])]}, b"12", r"UINT8 \[3\], needs 3 bytes, 2 came"),
    "negative size": ({"inputs": [_tensor(parameters={"binary_data_size": -1})]}, b"", "announces -1 bytes"),
    "a size that is none": ({"inputs": [_tensor(parameters={"binary_data_size": "2"})]}, b"12", "neither data nor"),
    "true for a size": (
        {"inputs": [_tensor(shape=[1], parameters={"binary_data_size": True})]},
        b"1",
        "neither data nor",
    ),
    "no data": ({"inputs": [_tensor(parameters={})]}, b"", "neither data nor"),
    "too few elements": ({"inputs": [_tensor(data=[1])]}, b"", r"shape \[2\] has 1 elements, not 2"),
    "elements of another kind": ({"inputs": [_tensor(data=["a", "b"])]}, b"", "data that is not UINT8"),
    "elements out of range": ({"inputs": [_tensor(data=[1, 256])]}, b"", "data that is not UINT8"),
    "null elements": ({"inputs": [_tensor(data=[1, None])]}, b"", "data that is not UINT8"),
    "floats for integers": ({"inputs": [_tensor(data=[1, 1.5])]}, b"", "data that is not UINT8"),
    "beyond single precision": ({"inputs": [_tensor(datatype="FP32", data=[1, 1e39])]}, b"", "data that is not FP32"),
    "beyond half precision": ({"inputs": [_tensor(datatype="FP16", data=[1, 70000])]}, b"", "data that is not FP16"),
    "BF16 in JSON": ({"inputs": [_tensor(datatype="BF16", data=[1, 2])]}, b"", "binary form only"),
    "BYTES that do not add up": (
        {"inputs": [_tensor(datatype="BYTES", shape=[1], parameters={"binary_data_size": 6})]},
        b"\x09\0\0\0ab",
        "overruns its tensor",
    ),
    "BYTES of another count": (
        {"inputs": [_tensor(datatype="BYTES", shape=[2], parameters={"binary_data_size": 6})]},
        b"\x02\0\0\0ab",
        "has 1 elements, not 2",
    ),
    "too many tensors": ({"inputs": [_tensor(name=str(n)) for n in range(65)]}, b"12" * 65, "65 inputs, at most 64"),
    "a header without end": (b"[" * (1 << 20) + b" ", b"", "at most 1048576 are read"),
    "nesting without end": (b'{"inputs":' + b"[" * 60_000, b"", "not a valid inference header"),
    "more lists than data needs": (b'{"inputs":[' + b"[]," * 300_000, b"", "lists, at most 16384 are read; send data"),
    "more objects than there are tensors": (b'{"inputs":[' + b"{}," * 300_000, b"", "objects, at most 8192 are read"),
    "more texts than anybody reads": (
        b'{"inputs":[{"data":[' + b'"",' * 300_000,
        b"",
        "quotation marks, at most 65536",
    ),
    "lists beside numbers": ({"inputs": [_tensor(data=[[1], 2])]}, b"", "data that is not UINT8"),
    "lists within numbers": ({"inputs": [_tensor(data=[1, [2]])]}, b"", "data that is not UINT8"),
    "texts beside lists": ({"inputs": [_tensor(datatype="BYTES", data=[["a"], "b"])]}, b"", "data that is not BYTES"),
}


@pytest.mark.parametrize("what", WRONG)
def test_refuses(what: str) -> None:
    header, body, text = WRONG[what]
    encoded = header if isinstance(header, bytes) else msgspec.json.encode(header)
    with pytest.raises(ProtocolError, match=text):
        oip.decode_request(encoded, body)


@pytest.mark.parametrize("length", [0, -1, 100])
def test_refuses_a_header_length_that_does_not_fit(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"Inference-Header-Content-Length is {length}, the body has 5 bytes"):
        oip.split(b"12345", length)


# --- anything at all

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=10,
)
odd_tensors = st.fixed_dictionaries(
    {"name": st.text(max_size=2) | json_values},
    optional={
        "datatype": datatypes | json_values,
        "shape": st.lists(st.integers(-2, 6), max_size=10) | json_values,
        "data": json_values,
        "parameters": st.dictionaries(
            st.sampled_from(["binary_data_size", "content_type", "x"]), st.integers(-2, 20) | json_values, max_size=3
        ),
    },
)
odd_headers = st.fixed_dictionaries(
    {},
    optional={
        "inputs": st.lists(odd_tensors, max_size=3),
        "outputs": st.lists(odd_tensors, max_size=3),
        "id": json_values,
    },
)


@given(st.binary(max_size=100), st.binary(max_size=20))
def test_any_bytes_are_decoded_or_refused(header: bytes, body: bytes) -> None:
    for decode in (oip.decode_request, oip.decode_response):
        with contextlib.suppress(ProtocolError):
            decode(header, body)


@given(odd_headers, st.binary(max_size=30))
def test_any_header_is_decoded_or_refused_and_what_is_decoded_can_be_read(header: Any, body: bytes) -> None:
    encoded = msgspec.json.encode(header)
    with contextlib.suppress(ProtocolError):
        request, payload = oip.decode_request(encoded, body)
        for tensor, raw in zip(request.inputs, payload.tensors, strict=True):
            assert len(oip.elements(tensor, raw)) == math.prod(tensor.shape)
        again, same = oip.decode_request(payload.header, _body(payload))
        assert (again, _body(same)) == (request, _body(payload))
    with contextlib.suppress(ProtocolError):
        _, payload = oip.decode_response(encoded, body)
        json.loads(oip.to_json(payload))


@given(st.binary(max_size=60))
def test_any_bytes_tensor_is_read_or_refused(raw: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert b"".join(map(oip.bytes_element, oip.bytes_elements(raw))) == raw


@pytest.mark.parametrize("datatype", ["FP32", "FP16", "INT64", "UINT8"])
def test_the_most_numbers_that_json_can_hold_take_little_memory_while_they_are_read(datatype: str) -> None:
    count = 520_000
    data = b"[" + b"7," * (count - 1) + b"7]"
    header = b'{"inputs":[{"name":"x","datatype":"%b","shape":[%d],"data":%b}]}' % (datatype.encode(), count, data)
    tracemalloc.start()
    try:
        parsed, payload = oip.decode_request(header)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(payload.tensors[0]) == count * ITEM_BYTES[datatype]
    assert oip.elements(parsed.inputs[0], payload.tensors[0])[-1] == 7
    assert peak_bytes < 16 << 20
