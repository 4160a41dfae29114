from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path

import pytest

from edgeinfer import oip
from edgeinfer.gateway.intake import Form
from edgeinfer.gateway.reply import ENDING_STATUS, REFUSAL_STATUS, detach, json_reply, outcome_reply
from edgeinfer.request import (
    Deadlines,
    Ending,
    Expired,
    Failure,
    InferRequest,
    OutcomeKind,
    Placement,
    Reason,
    Refusal,
    Result,
    Timeline,
    conclude,
)


def _request() -> InferRequest:
    payload = oip.encode_request([("x", "FP32", [1], bytes(4))])
    return InferRequest("m", payload, Deadlines(10**9), Timeline(received_ns=0), accept_late=True)


def _result(released: list[bool] | None = None) -> Result:
    class Lease:
        def release(self) -> None:
            if released is not None:
                released.append(True)

    payload = oip.encode_response(
        [("a", "FP32", [3], struct.pack("<3f", 1.5, math.nan, math.inf)), ("b", "INT32", [1], struct.pack("<i", 7))],
        parameters={"label": "cat", "score": 0.5},
    )
    return Result(payload, Placement.NEARBY, "box-1", "1.0.0", "int8", "d" * 64, Lease())


def test_every_refusal_and_ending_has_a_status() -> None:
    assert set(REFUSAL_STATUS) == set(Reason)
    assert set(ENDING_STATUS) == set(OutcomeKind) - {OutcomeKind.REJECTED}


@pytest.mark.parametrize("reason", Reason)
def test_a_refusal_says_its_reason_to_people_and_programs(reason: Reason) -> None:
    reply = outcome_reply(conclude(_request(), Refusal(reason, "why"), now_ns=5), Form("r1", binary=True))
    body = json.loads(b"".join(bytes(chunk) for chunk in reply.chunks))
    assert reply.status == REFUSAL_STATUS[reason]
    assert 400 <= reply.status < 600
    assert body == {
        "error": f"rejected ({reason}): why", "outcome": "rejected", "reason": reason.value, "detail": "why",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ending", "status", "outcome"),
    [(Expired("x"), 504, "expired"), (Failure("crashed", "SIGSEGV"), 500, "failed"), (None, 499, "cancelled")],
)
def test_other_endings(ending: Ending, status: int, outcome: str) -> None:
    reply = outcome_reply(conclude(_request(), ending, now_ns=5), Form("r1", binary=False))
    body = json.loads(bytes(reply.chunks[0]))
    assert (reply.status, body["outcome"]) == (status, outcome)


def test_a_json_answer_has_null_for_what_json_cannot_say() -> None:
    reply = outcome_reply(conclude(_request(), _result(), now_ns=2_500_000), Form("r1", binary=False))
    body = json.loads(bytes(reply.chunks[0]))
    assert reply.content_type == "application/json"
    assert body["id"] == "r1"
    assert (body["model_name"], body["model_version"]) == ("m", "1.0.0")
    assert body["outputs"][0] == {
        "name": "a", "datatype": "FP32", "shape": [3], "data": [1.5, None, None], "parameters": {"non_finite": 2},
    }  # fmt: skip
    assert body["outputs"][1]["data"] == [7]
    assert body["parameters"] == {
        "label": "cat", "score": 0.5, "outcome": "ok", "placement": "nearby", "where": "box-1", "variant": "int8",
        "digest": "d" * 64, "latency_ms": 2.5,
    }  # fmt: skip


def test_an_answer_tells_its_phases() -> None:
    request = _request()
    timeline = request.timeline
    timeline.dispatched_ns, timeline.decoded_ns, timeline.started_ns = 1_000_000, 1_500_000, 1_500_000
    timeline.finished_ns, timeline.postprocessed_ns = 9_500_000, 9_750_000
    reply = outcome_reply(conclude(request, _result(), now_ns=10_000_000), Form("r1", binary=False))
    said = json.loads(bytes(reply.chunks[0]))["parameters"]
    phases = {key: value for key, value in said.items() if key.endswith("_ms")}
    assert phases == {"wait_ms": 1.0, "decode_ms": 0.5, "run_ms": 8.0, "post_ms": 0.25, "latency_ms": 10.0}


def test_a_late_answer_says_so() -> None:
    reply = outcome_reply(conclude(_request(), _result(), now_ns=2 * 10**9), Form("r1", binary=False))
    assert reply.status == 200
    assert json.loads(bytes(reply.chunks[0]))["parameters"]["outcome"] == "late"


def test_a_binary_answer_is_the_tensors_themselves() -> None:
    reply = outcome_reply(conclude(_request(), _result(), now_ns=5), Form("r1", binary=True))
    assert reply.headers == ((oip.HEADER_LENGTH, str(len(bytes(reply.chunks[0])))),)
    header, payload = oip.decode_response(bytes(reply.chunks[0]), b"".join(bytes(chunk) for chunk in reply.chunks[1:]))
    assert struct.unpack("<f", bytes(payload.tensors[0][:4])) == (1.5,)
    assert [tensor.name for tensor in header.outputs] == ["a", "b"]


def test_one_output_in_binary_and_one_in_json() -> None:
    reply = outcome_reply(conclude(_request(), _result(), now_ns=5), Form("r1", binary=frozenset({"b"})))
    header = json.loads(bytes(reply.chunks[0]))
    assert header["outputs"][0]["data"][0] == 1.5
    assert header["outputs"][1]["parameters"] == {"binary_data_size": 4}
    assert bytes(reply.chunks[1]) == struct.pack("<i", 7)


def test_only_the_outputs_that_were_asked_for() -> None:
    reply = outcome_reply(conclude(_request(), _result(), now_ns=5), Form("r1", frozenset({"b"}), binary=False))
    assert [tensor["name"] for tensor in json.loads(bytes(reply.chunks[0]))["outputs"]] == ["b"]


def test_an_output_too_large_for_json_is_refused_and_given_back() -> None:
    def large(released: list[bool], size: int) -> Result:
        result = _result(released)
        result.payload = oip.encode_response([("a", "UINT8", [size], bytes(size)), ("b", "INT32", [1], bytes(4))])
        return result

    released: list[bool] = []
    reply = outcome_reply(conclude(_request(), large(released, (32 << 10) - 1), now_ns=5), Form(binary=False))
    assert (reply.status, released) == (200, [])
    reply = outcome_reply(conclude(_request(), large(released, 32 << 10), now_ns=5), Form(binary=False))
    assert (reply.status, released) == (400, [True]), "all of them together"
    assert b"ask for it in binary form" in bytes(reply.chunks[0])
    for form in (Form(binary=True), Form(outputs=frozenset({"b"}), binary=False), Form(binary=frozenset({"a"}))):
        assert outcome_reply(conclude(_request(), large([], 2 << 20), now_ns=5), form).status == 200


def test_an_answer_that_waits_for_its_turn_holds_nothing_of_a_worker() -> None:
    released: list[bool] = []
    outcome = conclude(_request(), _result(released), now_ns=5)
    assert outcome.result is not None
    form = Form(outputs=frozenset({"b"}), binary=False)
    detach(outcome.result, form)
    assert released == [True]
    assert json.loads(bytes(outcome_reply(outcome, form).chunks[0]))["outputs"][0]["data"] == [7]
    outcome.result.release()
    assert released == [True]


def test_the_result_is_given_back_by_release_and_not_before() -> None:
    released: list[bool] = []
    reply = outcome_reply(conclude(_request(), _result(released), now_ns=5), Form("r1", binary=True))
    assert not released
    reply.release()
    assert released == [True]


def test_documents_may_hold_what_json_does_not_know() -> None:
    reply = json_reply({"nan": math.nan, "path": Path("/x")})
    assert json.loads(bytes(reply.chunks[0])) == {"nan": None, "path": "/x"}


def test_the_documented_table_of_statuses_is_the_real_one() -> None:
    document = (Path(__file__).parents[2] / "docs/client.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (\d+) \|", document, re.MULTILINE)
    rejected = {reason.strip("`"): int(status) for outcome, reason, status in rows if outcome == "rejected"}
    assert rejected == {reason.value: status for reason, status in REFUSAL_STATUS.items()}
    others = {outcome: int(status) for outcome, _, status in rows if outcome != "rejected"}
    assert others == {kind.value: status for kind, status in ENDING_STATUS.items() if status != 200}
