from __future__ import annotations

import re
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from edgeinfer import oip
from edgeinfer.artifact.manifest import Manifest, TensorSpec
from edgeinfer.gateway.catalog import ModelInfo
from edgeinfer.gateway.intake import Intake, Recall, draft, take_request
from edgeinfer.request import DataScope, Reason, Refusal
from tests.gateway.serving import DIGEST, DOUBLE, INTENT, LISTEN, manifest

NOW = 1_000_000_000


def _take(model: Manifest, body: bytes, headers: dict[str, str] | None = None) -> Intake | Refusal:
    return take_request(ModelInfo(model, DIGEST, ready=True), None, headers or {}, body, now_ns=NOW)


def _body(parameters: dict[str, Any] | None = None, outputs: list[Any] | None = None) -> bytes:
    return msgspec.json.encode(
        {
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [[1, 2]]}],
            "parameters": parameters or {},
            "outputs": outputs or [],
        }
    )


def _taken(parameters: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> Intake:
    taken = _take(DOUBLE, _body(parameters), headers)
    assert isinstance(taken, Intake), taken
    return taken


def test_defaults_are_firm_on_this_device_within_ten_seconds() -> None:
    request = _taken().request
    assert request.deadlines.total_ns == NOW + 10_000_000_000
    assert (request.scope, request.firm, request.accept_late, request.priority) == (DataScope.DEVICE, True, False, 0)
    assert (request.stream, request.sequence_start, request.version) == (None, False, None)
    assert request.timeline.received_ns == NOW


def test_long_parameters_are_refused_before_they_become_objects() -> None:
    body = msgspec.json.encode(msgspec.json.decode(_body()) | {"parameters": {"x": [[]] * 300_000}})
    tracemalloc.start()
    try:
        assert isinstance(_take(DOUBLE, body), Refusal)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 << 20


def test_the_models_own_deadline_is_the_default_and_the_header_wins() -> None:
    body = msgspec.json.encode(
        {"inputs": [{"name": "audio", "datatype": "FP32", "shape": [1, 512], "data": [0.0] * 512}]}
    )
    taken = _take(LISTEN, body)
    assert isinstance(taken, Intake)
    assert taken.request.deadlines.total_ns == NOW + 32_000_000
    assert _taken({"timeout": 1500}).request.deadlines.total_ns == NOW + 1_500_000
    assert _taken({"timeout": 1500, "deadline_ms": 9}).request.deadlines.total_ns == NOW + 9_000_000
    both = _taken({"deadline_ms": 20}, {"edgeinfer-deadline-ms": "2.5"})
    assert both.request.deadlines.total_ns == NOW + 2_500_000


def test_parameters_reach_the_request() -> None:
    request = _taken({
        "priority": 3, "firm": False, "accept_late": True, "scope": "site", "sequence_id": 42, "sequence_start": True,
    }).request  # fmt: skip
    assert (request.priority, request.firm, request.accept_late) == (3, False, True)
    assert request.scope is DataScope.SITE
    assert (request.stream, request.sequence_start) == ("client:double:42", True)


def test_reports_do_not_grow_with_the_sequences_that_callers_invent() -> None:
    assert {_taken({"sequence_id": number}).request.origin for number in range(1, 100)} == {"double"}


@pytest.mark.parametrize(
    "parameters",
    [
        {"deadline_ms": 0}, {"deadline_ms": -1}, {"deadline_ms": "soon"}, {"deadline_ms": True}, {"deadline_ms": []},
        {"deadline_ms": 1e12}, {"deadline_ms": "nan"}, {"priority": 1.5}, {"priority": 10**6}, {"priority": True},
        {"scope": "world"}, {"scope": None}, {"firm": 1}, {"accept_late": "yes"}, {"sequence_start": 0},
        {"sequence_id": []}, {"sequence_id": "x" * 129}, {"sequence_id": True},
        {"timeout": 10**400}, {"timeout": -1}, {"timeout": True}, {"timeout": 600_000_001}, {"timeout": 1.5},
        {"deadline_ms": 10**400}, {"deadline_ms": -(10**400)}, {"deadline_ms": "1" * 5000}, {"deadline_ms": 600_001},
        {"priority": 10**400}, {"sequence_id": 10**400}, {"scope": 10**400}, {"firm": 10**400}, {"scope": {"a": []}},
    ],
)  # fmt: skip
def test_refuses_parameters_that_mean_nothing(parameters: dict[str, Any]) -> None:
    refusal = _take(DOUBLE, _body(parameters))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.INPUT_INVALID
    assert next(iter(parameters)) in refusal.detail


def test_a_models_deadline_is_held_to_the_bound_of_a_given_one() -> None:
    boundless = structs.replace(DOUBLE, deadline_ms=1e308)
    taken = _take(boundless, _body())
    assert isinstance(taken, Intake)
    assert taken.request.deadlines.total_ns == NOW + 600_000_000_000


@pytest.mark.parametrize(
    "grown",
    [
        {"parameters": {"x": "y" * 70_000}}, {"parameters": {"x": [[]] * 30_000}}, {"id": "y" * 70_000},
        {"outputs": [{"name": "y" * 70_000}]}, {"outputs": [{"name": ""}] * 9_000},
        {"inputs": [{"name": "x", "parameters": {"x": [{}] * 30_000}}]}, {"inputs": [{"name": ""}] * 9_000},
    ],
)  # fmt: skip
def test_what_is_said_about_the_tensors_is_bounded_as_it_is_read_again_on_its_way(grown: dict[str, Any]) -> None:
    refusal = _take(DOUBLE, msgspec.json.encode(msgspec.json.decode(_body()) | grown))
    assert isinstance(refusal, Refusal)
    assert re.search("at most (65536 are taken|16384 are read|8192 are read)", refusal.detail)
    data = [[0.12345, 1.0]] * 8_000
    tensor = {"name": "x", "datatype": "FP32", "shape": [8_000, 2], "data": data}
    assert isinstance(_take(DOUBLE, msgspec.json.encode({"inputs": [tensor]})), Intake)


def test_tensors_in_json_are_bounded_and_the_refusal_says_what_to_do() -> None:
    for count, fits in ((15_000, True), (40_000, False)):
        tensor = {"name": "x", "datatype": "FP32", "shape": [count, 2], "data": [1] * (2 * count)}
        taken = _take(DOUBLE, msgspec.json.encode({"inputs": [tensor]}))
        assert isinstance(taken, Intake) == fits
    assert isinstance(taken, Refusal)
    assert re.search("at most 131072 are read; send tensors as binary data .*binary_data_size", taken.detail)


def test_outputs_of_fixed_size_that_are_too_large_for_json_are_refused_before_the_run() -> None:
    outputs = [
        TensorSpec("small", "FP32", [8]),
        TensorSpec("large", "FP16", [200, 200]),
        TensorSpec("n", "FP32", [-1], [1 << 20]),
    ]
    model = manifest("wide", DOUBLE.inputs, outputs)
    refused = _take(model, _body())
    assert isinstance(refused, Refusal)
    assert re.search("output 'large' has 160000 bytes .*at most 131072 .*binary_data_output", refused.detail)
    for parameters, wanted in (
        ({"binary_data_output": True}, []),
        ({}, [{"name": "small"}, {"name": "n"}]),
        ({}, [{"name": "small"}, {"name": "large", "parameters": {"binary_data": True}}]),
    ):
        assert isinstance(_take(model, _body(parameters, wanted)), Intake)


def test_a_shape_that_does_not_fit_is_told_before_the_tensor_is_there() -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [2000, 2000], "parameters": {"binary_data_size": 16_000_000}}
    refused = draft(
        ModelInfo(DOUBLE, DIGEST, ready=True), None, {}, msgspec.json.encode({"inputs": [tensor]}), now_ns=NOW
    )
    assert isinstance(refused, Refusal)
    assert refused.detail == "input 'x' takes FP32 [-1, 2] up to [1048576, 2]; FP32 [2000, 2000] came"


@pytest.mark.parametrize(
    ("parameters", "outputs", "binary"),
    [
        ({}, [], False),
        ({"binary_data_output": True}, [], True),
        ({}, [{"name": "y", "parameters": {"binary_data": True}}], True),
        ({"binary_data_output": True}, [{"name": "y", "parameters": {"binary_data": False}}], False),
        ({}, [{"name": "y", "parameters": {"binary_data": True}}, {"name": "n"}], frozenset({"y"})),
    ],
)
def test_form_of_the_answer(parameters: dict[str, Any], outputs: list[Any], binary: frozenset[str] | bool) -> None:
    taken = _take(DOUBLE, _body(parameters, outputs))
    assert isinstance(taken, Intake)
    assert taken.form.binary == binary


def test_refuses_an_output_that_there_is_not() -> None:
    refusal = _take(DOUBLE, _body(outputs=[{"name": "z"}]))
    assert refusal == Refusal(Reason.INPUT_INVALID, "there is no output 'z'; double gives y, n")


@pytest.mark.parametrize("length", ["-1", "x", "999999", "1e3", "²"])
def test_refuses_a_header_length_that_is_none(length: str) -> None:
    refusal = _take(DOUBLE, _body(), {"inference-header-content-length": length})
    assert isinstance(refusal, Refusal)


@given(body=st.binary(max_size=200), length=st.none() | st.integers(0, 300))
def test_any_body_is_refused_and_none_crashes(body: bytes, length: int | None) -> None:
    headers = {} if length is None else {"inference-header-content-length": str(length)}
    assert isinstance(_take(INTENT, body, headers), Refusal)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400)])
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(["x", "text", "y", ""]) | st.text(max_size=3)
tensors = st.fixed_dictionaries(
    {"name": names},
    optional={
        "datatype": st.sampled_from(["FP32", "BYTES", "INT64", "BF16", "FP16", "BOOL", "?"]),
        "shape": st.lists(st.integers(-2, 5), max_size=4) | json_values,
        "data": json_values,
        "parameters": st.dictionaries(
            st.sampled_from(["binary_data_size", "content_type", "binary_data"]), json_values, max_size=2
        ),
    },
)
bodies = st.fixed_dictionaries(
    {"inputs": st.lists(tensors, max_size=2)},
    optional={
        "outputs": st.lists(tensors, max_size=2),
        "id": st.text(max_size=4),
        "parameters": st.dictionaries(
            st.sampled_from(
                ["deadline_ms", "timeout", "priority", "scope", "firm", "sequence_id", "binary_data_output"]
            ),
            json_values,
            max_size=3,
        ),
    },
)


@given(body=bodies, model=st.sampled_from([INTENT, DOUBLE]), tail=st.binary(max_size=12))
def test_any_json_is_taken_or_refused_and_none_crashes(body: Any, model: Manifest, tail: bytes) -> None:
    encoded = msgspec.json.encode(body)
    taken = _take(model, encoded + tail, {"inference-header-content-length": str(len(encoded))})
    if isinstance(taken, Intake):
        header = oip.request_header(taken.request.payload)
        assert len(header.inputs) == len(taken.request.payload.tensors)
    else:
        assert taken.detail


def _said(shape: list[int], **tensor: Any) -> bytes:
    described = {"name": "x", "datatype": "FP32", "shape": shape, **tensor}
    return msgspec.json.encode({"inputs": [described], "parameters": {"deadline_ms": 50}})


def _again(recall: Recall, headers: dict[str, str], header: bytes, body: bytes, now_ns: int) -> Intake | Refusal:
    drafted = recall.draft(ModelInfo(DOUBLE, DIGEST, ready=True), None, headers, header, now_ns=now_ns)
    return drafted if isinstance(drafted, Refusal) else drafted.complete(body, {})


def test_the_same_said_again_is_a_new_request_with_its_own_time_and_numbers() -> None:
    recall, headers = Recall(), dict[str, str]()
    header = _said([1, 2], parameters={"binary_data_size": 8})
    for number in range(3):
        taken = _again(recall, headers, header, bytes([number]) * 8, NOW + number)
        assert isinstance(taken, Intake)
        assert taken.request.deadlines.total_ns == NOW + number + 50_000_000
        assert taken.request.timeline.received_ns == NOW + number
        assert bytes(taken.request.payload.tensors[0]) == bytes([number]) * 8
        assert oip.request_header(taken.request.payload).inputs[0].shape == [1, 2]
    first, second = (_again(recall, headers, header, bytes(8), NOW) for _ in range(2))
    assert isinstance(first, Intake)
    assert isinstance(second, Intake)
    assert first.request.id != second.request.id
    assert first.request.timeline is not second.request.timeline
    for body in (b"", bytes(7), bytes(9)):
        assert isinstance(_again(recall, headers, header, body, NOW), Refusal), "the tensors are checked each time"
    assert isinstance(
        _again(recall, headers, _said([2, 2], parameters={"binary_data_size": 8}), bytes(8), NOW), Refusal
    )
    assert isinstance(_again(recall, headers, header, bytes(8), NOW), Intake)


def test_a_head_or_a_model_that_changed_is_read_anew() -> None:
    recall = Recall()
    header = _said([1, 2], parameters={"binary_data_size": 8})
    assert isinstance(_again(recall, {}, header, bytes(8), NOW), Intake)
    taken = _again(recall, {"edgeinfer-deadline-ms": "70"}, header, bytes(8), NOW)
    assert isinstance(taken, Intake)
    assert taken.request.deadlines.total_ns == NOW + 70_000_000
    other = recall.draft(ModelInfo(LISTEN, DIGEST, ready=True), None, {}, header, now_ns=NOW)
    assert isinstance(other, Refusal) or isinstance(other.complete(bytes(8), {}), Refusal)


def test_what_only_the_data_tells_is_read_each_time() -> None:
    recall, headers = Recall(), dict[str, str]()
    in_json = _said([1, 2], data=[1, 2])
    for _ in range(3):
        taken = _again(recall, headers, in_json, b"", NOW)
        assert isinstance(taken, Intake)
        assert oip.elements(oip.Tensor("x", "FP32", [1, 2]), taken.request.payload.tensors[0]) == [1, 2]


@pytest.mark.parametrize(
    "said",
    ["1_0", " 10", "0x10", "nan", "inf", "+5", "", "1e", "\u0661", "10.", "1" + "0" * 45, "0." + "0" * 45 + "e9"],
)
def test_a_deadline_in_a_header_is_a_plain_number(said: str) -> None:
    refusal = _take(DOUBLE, _body(), {"edgeinfer-deadline-ms": said})
    assert isinstance(refusal, Refusal)
    assert "is not a number of milliseconds" in refusal.detail


@pytest.mark.parametrize(("said", "ms"), [("10", 10), ("0.5", 0.5), ("1e2", 100), ("007", 7)])
def test_a_deadline_in_a_header(said: str, ms: float) -> None:
    taken = _take(DOUBLE, _body(), {"edgeinfer-deadline-ms": said})
    assert isinstance(taken, Intake)
    assert taken.request.deadlines.total_ns == NOW + ms * 1_000_000
