"""What a peer sent is an answer only if its tensors are the model's; what they mean is computed here."""

from __future__ import annotations

import array
import math
import re
import struct

import pytest

from edgeinfer import oip
from edgeinfer.artifact.answer import MAX_SEARCHED_BYTES, check_outputs, label, max_answer_bytes
from edgeinfer.artifact.manifest import Classes, Manifest, TensorSpec
from edgeinfer.request import Payload
from tests.gateway.serving import manifest

X = TensorSpec("x", "FP32", [1])
FIXED = TensorSpec("y", "FP32", [1, 2])
VARIES = TensorSpec("y", "INT32", [-1, 2], [4, 2])
TEXTS = TensorSpec("y", "BYTES", [-1], [8])
LARGE = TensorSpec("y", "FP32", [1 << 20])


def _one(datatype: str, shape: list[int], raw: bytes, name: str = "y") -> Payload:
    return oip.encode_response([(name, datatype, shape, raw)])


def _check(spec: TensorSpec, payload: Payload, *wanted: str) -> str | None:
    return check_outputs(manifest("m", [X], [spec]), oip.response_header(payload), payload, wanted=wanted)


FITTING = {
    "fixed shape": (FIXED, _one("FP32", [1, 2], bytes(8))),
    "smaller than the bound": (VARIES, _one("INT32", [1, 2], bytes(8))),
    "nothing found": (VARIES, _one("INT32", [0, 2], b"")),
    "texts": (TEXTS, _one("BYTES", [2], oip.bytes_element(b"a") + oip.bytes_element(b"b"))),
    "large and finite numbers": (FIXED, _one("FP32", [1, 2], struct.pack("<2f", 3e38, 3e38))),
    "infinity where it is meant": (
        TensorSpec("y", "FP32", [1], allow_non_finite=True),
        _one("FP32", [1], struct.pack("<f", math.inf)),
    ),
    "doubles whose sum is beyond a double": (
        TensorSpec("y", "FP64", [2]),
        _one("FP64", [2], struct.pack("<2d", 1.7e308, 1.7e308)),
    ),
}
STRANGE = {
    "nothing": (FIXED, oip.encode_response([]), "'y' is missing"),
    "another name": (FIXED, _one("FP32", [1, 2], bytes(8), name="z"), "no output 'z'"),
    "another datatype": (FIXED, _one("INT64", [1, 2], bytes(16)), "INT64"),
    "another shape": (FIXED, _one("FP32", [2, 1], bytes(8)), r"\[2, 1\]"),
    "another rank": (FIXED, _one("FP32", [2], bytes(8)), r"\[2\]"),
    "beyond the bound": (VARIES, _one("INT32", [5, 2], bytes(40)), r"\[5, 2\]"),
    "too few bytes": (FIXED, _one("FP32", [1, 2], bytes(4)), "8 bytes, 4 came"),
    "NaN": (FIXED, _one("FP32", [1, 2], struct.pack("<2f", 1, math.nan)), "1 of 2 values"),
    "infinities that cancel out": (
        FIXED,
        _one("FP32", [1, 2], struct.pack("<2f", math.inf, -math.inf)),
        "2 of 2 values",
    ),
    "NaN in FP64": (TensorSpec("y", "FP64", [1]), _one("FP64", [1], struct.pack("<d", math.nan)), "NaN"),
    "NaN in FP16": (TensorSpec("y", "FP16", [1]), _one("FP16", [1], struct.pack("<e", math.nan)), "NaN"),
    "infinity in BF16": (TensorSpec("y", "BF16", [1]), _one("BF16", [1], b"\x80\x7f"), "infinite"),
    "8 MB of text": (TEXTS, _one("BYTES", [1], oip.bytes_element(bytes(8 << 20))), "at most"),
    "as many more": (
        FIXED,
        oip.encode_response([("y", "FP32", [1, 2], bytes(8)), ("y", "FP32", [1, 2], bytes(8))]),
        "2 times",
    ),
}


@pytest.mark.parametrize("name", FITTING)
def test_answers_of_the_model_pass(name: str) -> None:
    spec, payload = FITTING[name]
    assert _check(spec, payload) is None


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_no_answer_of_the_model_is_told_why(name: str) -> None:
    spec, payload, why = STRANGE[name]
    problem = _check(spec, payload)
    assert problem is not None
    assert re.search(why, problem), problem


def test_a_large_output_is_judged_by_its_size_alone() -> None:
    raw = struct.pack("<f", math.nan) * (1 << 20)
    assert len(raw) > MAX_SEARCHED_BYTES
    assert _check(LARGE, _one("FP32", [1 << 20], raw)) is None


def test_an_answer_has_exactly_the_outputs_that_were_asked_for() -> None:
    two = manifest("m", [X], [FIXED, TensorSpec("z", "INT8", [1])])
    only_z, both = (
        oip.encode_response([("z", "INT8", [1], b"\1")]),
        oip.encode_response([("y", "FP32", [1, 2], bytes(8)), ("z", "INT8", [1], b"\1")]),
    )
    assert check_outputs(two, oip.response_header(only_z), only_z, wanted=["z"]) is None
    assert check_outputs(two, oip.response_header(only_z), only_z) is not None
    assert check_outputs(two, oip.response_header(both), both, wanted=["z"]) is not None


def test_the_bound_of_an_answer_is_that_of_its_outputs() -> None:
    assert max_answer_bytes(manifest("m", [X], [FIXED, TensorSpec("z", "INT32", [-1, 2], [4, 2])])) == 8 + 32


def _classes(spec: TensorSpec, classes: Classes) -> Manifest:
    made = manifest("m", [X], [spec])
    return type(made)(**{name: getattr(made, name) for name in made.__struct_fields__} | {"classes": classes})


@pytest.mark.parametrize(
    ("scores", "threshold", "expected"),
    [
        ([0.75], 0.75, {"label": "b", "score": 0.75}),
        ([0.5], 0.75, {"label": "a", "score": 0.5}),
        ([0.5, 0.25], None, {"label": "a", "score": 0.5}),
        ([0.5, 0.5], None, {"label": "a", "score": 0.5}),
        ([-2.0, -1.0], None, {"label": "b", "score": -1.0}),
    ],
)
def test_the_label_is_made_of_the_scores(
    scores: list[float], threshold: float | None, expected: dict[str, object]
) -> None:
    model = _classes(TensorSpec("y", "FP32", [len(scores)]), Classes("y", ["a", "b"], threshold))
    payload = _one("FP32", [len(scores)], array.array("f", scores).tobytes())
    assert check_outputs(model, oip.response_header(payload), payload) is None
    assert label(model, oip.response_header(payload), payload) == expected


def test_scores_that_do_not_fit_the_labels_are_no_answer() -> None:
    model = _classes(TensorSpec("y", "FP32", [-1], [8]), Classes("y", ["a", "b"]))
    payload = _one("FP32", [3], bytes(12))
    problem = check_outputs(model, oip.response_header(payload), payload)
    assert problem is not None
    assert "3 scores for 2 classes" in problem
