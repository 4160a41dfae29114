"""Arrays and OIP bodies say the same; what does not fit the contract is named with what was expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgeinfer import oip
from edgeinfer.artifact.manifest import Classes, TensorSpec
from edgeinfer.worker import feed
from edgeinfer.worker.fault import Fault

ARRAYS = st.sampled_from(list(feed.NUMPY_TYPES.values())).flatmap(
    lambda kind: hnp.arrays(kind, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)


def header_of(**tensors: tuple[str, list[int], bytes]) -> tuple[oip.RequestHeader, memoryview]:
    payload = oip.encode_request([(name, *rest) for name, rest in tensors.items()])
    return oip.request_header(payload), memoryview(b"".join(payload.tensors))


@given(ARRAYS, st.integers(0, 3))
def test_any_array_survives_the_way_out_and_back_at_any_alignment(array: np.ndarray[Any, Any], offset: int) -> None:
    name, datatype, shape, raw = feed.raw_output("y", array)
    area = bytearray(offset) + bytearray(raw)
    back = feed.tensor_array(oip.Tensor(name, datatype, shape), memoryview(area)[offset:])
    assert back.dtype == array.dtype
    assert back.flags.aligned
    np.testing.assert_array_equal(back, array)


@given(st.lists(st.text(st.characters(codec="utf-8")), max_size=6))
def test_strings_survive_too(words: list[str]) -> None:
    array = np.empty(len(words), object)
    array[:] = words
    name, datatype, shape, raw = feed.raw_output("y", array)
    assert feed.tensor_array(oip.Tensor(name, datatype, shape), memoryview(raw)).tolist() == words


def test_aligned_tensors_are_not_copied() -> None:
    area = np.zeros(64, np.uint8)
    view = feed.tensor_array(oip.Tensor("x", "FP32", [4]), area.data[:16])
    area[:4] = np.frombuffer(np.float32(7).tobytes(), np.uint8)
    assert view[0] == 7


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"z": ("FP32", [1, 2], bytes(8))}, "no input 'z'; the model takes x"),
        ({}, "'x' is missing"),
        ({"x": ("FP32", [1, 9], bytes(36))}, r"takes FP32 [1, -1], at most [1, 8]; FP32 [1, 9] came"),
        ({"x": ("FP64", [1, 2], bytes(16))}, r"takes FP32 [1, -1], at most [1, 8]; FP64 [1, 2] came"),
        ({"x": ("FP32", [2], bytes(8))}, r"FP32 [2] came"),
        ({"x": ("FP32", [1, 2], bytes(7))}, "'x'"),
        ({"x": ("FP32", [1, 1], np.float32(np.inf).tobytes())}, "1 values that are NaN or infinite"),
        ({"x": ("BF16", [1, 1], bytes(2))}, "BF16"),
    ],
)
def test_input_outside_the_contract_is_named_with_what_was_expected(
    tensors: dict[str, tuple[str, list[int], bytes]], complaint: str
) -> None:
    specs = {"x": TensorSpec("x", "FP32", [1, -1], [1, 8])}
    with pytest.raises(Fault) as caught:
        feed.read_inputs(*header_of(**tensors), specs)
    assert caught.value.reason == "input_invalid"
    assert complaint in caught.value.detail


@given(hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32)))
def test_non_finite_values_are_counted_exactly(array: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    with np.errstate(all="ignore"):
        assert feed.count_non_finite(array) == sum(not np.isfinite(value) for value in array)


def test_finite_values_whose_sum_overflows_are_finite() -> None:
    with np.errstate(all="ignore"):
        assert feed.count_non_finite(np.full(8, np.finfo(np.float32).max, np.float32)) == 0
    assert feed.count_non_finite(np.full(8, np.finfo(np.float16).max, np.float16)) == 0


def test_largest_score_or_threshold_makes_the_label() -> None:
    many = Classes("y", ["cat", "dog", "owl"])
    assert feed.label(many, {"y": np.array([[0.1, 0.2, 0.75]], np.float32)}) == {"label": "owl", "score": 0.75}
    with pytest.raises(Fault, match="has 2 scores for 3 classes"):
        feed.label(many, {"y": np.zeros(2, np.float32)})


def compared(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], tolerance: float) -> tuple[float, str]:
    payload = oip.encode_response([feed.raw_output("y", expected)])
    body = memoryview(b"".join(payload.tensors))
    return feed.compare({"y": got}, oip.response_header(payload), body, tolerance)


def test_golden_comparison_judges_by_the_largest_difference() -> None:
    base = np.array([1.0, 2.0], np.float32)
    assert compared(base + np.float32(0.25), base, 0.3) == (0.25, "")
    worst, problem = compared(base + np.float32(0.25), base, 0.2)
    assert worst == 0.25
    assert problem == "output 'y' differs by 0.25, tolerance is 0.2"
    assert "is FP32 [2], expected FP32 [1, 2]" in compared(base, base[np.newaxis], 1)[1]
    assert "is FP32 [2], expected INT64 [2]" in compared(base, base.astype(np.int64), 1)[1]


def test_nan_agrees_only_with_nan() -> None:
    nan = np.array([np.nan, np.inf], np.float32)
    assert compared(nan, nan, 0) == (0.0, "")
    assert compared(np.array([1, np.inf], np.float32), nan, 1e9)[1]
    assert compared(nan, np.array([1, np.inf], np.float32), 1e9)[1]


def test_only_the_outputs_that_were_asked_for_are_given() -> None:
    outputs = {"a": np.zeros(1), "b": np.ones(1)}
    assert list(feed.only(outputs, [])) == ["a", "b"]
    assert list(feed.only(outputs, [oip.Tensor("b")])) == ["b"]
    with pytest.raises(Fault, match="no output 'c'; the model gives a, b"):
        feed.only(outputs, [oip.Tensor("c")])


PAIR = {"x": TensorSpec("x", "FP32", [1, -1], [1, 8]), "n": TensorSpec("n", "INT64", [1])}


def pair(values: list[float], number: int) -> tuple[bytes, memoryview]:
    x = np.array([values], np.float32)
    payload = oip.encode_request(
        [("x", "FP32", list(x.shape), x.tobytes()), ("n", "INT64", [1], np.int64(number).tobytes())]
    )
    return payload.header, memoryview(b"".join(payload.tensors))


def test_requests_with_one_header_are_read_each_for_itself() -> None:
    reader = feed.InputReader(PAIR)
    for values, number in (([1.0, 2.0], 1), ([3.0, 4.0], 2), ([5.0], 3), ([6.0, 7.0], 4)):
        header, feeds = reader.read(*pair(values, number))
        assert [tensor.name for tensor in header.inputs] == ["x", "n"]
        assert feeds["x"].tolist() == [values]
        assert feeds["n"].tolist() == [number]
        assert feeds["x"].flags.aligned


def test_what_a_known_header_announces_is_still_looked_at() -> None:
    reader = feed.InputReader(PAIR)
    header, body = pair([1.0, 2.0], 1)
    reader.read(header, body)
    _, wrong = pair([1.0, np.nan], 1)
    with pytest.raises(Fault, match="1 values that are NaN"):
        reader.read(header, wrong)
    with pytest.raises(Fault, match="are left"):
        reader.read(header, body[:-8])


def test_answers_say_what_they_hold_also_when_the_one_before_held_something_else() -> None:
    heads = feed.AnswerHeads("m", "1.0.0")
    one, two = np.zeros(2, np.float32), np.ones((1, 2), np.int64)
    asked: list[tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any], str]] = [
        ({"y": one}, {}, ""), ({"y": one + 1}, {}, ""), ({"y": two}, {}, ""), ({"y": two}, {}, "id"),
        ({"y": two}, {"label": "cat"}, "id"), ({"z": two}, {}, "id"), ({"z": two}, {}, "id"),
    ]  # fmt: skip
    for outputs, parameters, request_id in asked:
        payload = heads.answer(outputs, parameters, request_id)
        header, _ = oip.decode_response(payload.header, memoryview(b"".join(map(bytes, payload.tensors))))
        assert (header.id, header.parameters) == (request_id, parameters)
        for tensor, raw in zip(header.outputs, payload.tensors, strict=True):
            np.testing.assert_array_equal(feed.tensor_array(tensor, memoryview(bytes(raw))), outputs[tensor.name])
