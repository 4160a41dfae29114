from __future__ import annotations

import pytest

from edgeinfer import oip
from edgeinfer.artifact.contract import check_inputs
from edgeinfer.artifact.manifest import Decode, Manifest, TensorSpec
from edgeinfer.request import Payload, Reason
from tests.gateway.serving import manifest

FIXED = TensorSpec("x", "FP32", [1, 2])
VARIES = TensorSpec("x", "INT32", [-1, 2], [4, 2])
IMAGE = TensorSpec("x", "UINT8", [1, -1, -1, 3], [1, 64, 64, 3], decode=Decode("image"))
AUDIO = TensorSpec("x", "FP32", [1, 512], decode=Decode("audio", sample_rate_hz=16000))
WORDS = TensorSpec("x", "BYTES", [-1], [8], decode=Decode("words", pattern="[a-z]+"))


def _model(*specs: TensorSpec) -> Manifest:
    return manifest("m", list(specs), [TensorSpec("y", "FP32", [1])])


def _tensor(datatype: str, shape: list[int], size: int, name: str = "x") -> Payload:
    return oip.encode_request([(name, datatype, shape, bytes(size))])


def _media(content_type: str, size: int = 10, shape: list[int] | None = None) -> Payload:
    raw = oip.bytes_element(bytes(size))
    return oip.encode_request([("x", "BYTES", shape or [1], raw)], content_types={"x": content_type})


def _check(spec: TensorSpec, payload: Payload) -> str | None:
    refusal = check_inputs(_model(spec), oip.request_header(payload), payload)
    assert refusal is None or refusal.reason is Reason.INPUT_INVALID
    return None if refusal is None else refusal.detail


FITTING = {
    "fixed shape": (FIXED, _tensor("FP32", [1, 2], 8)),
    "smaller than the bound": (VARIES, _tensor("INT32", [1, 2], 8)),
    "exactly the bound": (VARIES, _tensor("INT32", [4, 2], 32)),
    "a size of 0 that is declared": (TensorSpec("x", "FP32", [0, 2]), _tensor("FP32", [0, 2], 0)),
    "decoded image": (IMAGE, _tensor("UINT8", [1, 2, 2, 3], 12)),
    "jpeg": (IMAGE, _media("image/jpeg")),
    "png, shouted": (IMAGE, _media("IMAGE/PNG; q=1")),
    "wav": (AUDIO, _media("audio/wav")),
    "text": (WORDS, _media("text/plain; charset=utf-8")),
    "words": (WORDS, oip.encode_request([("x", "BYTES", [2], oip.bytes_element(b"a") + oip.bytes_element(b"b"))])),
    "no words": (WORDS, oip.encode_request([("x", "BYTES", [0], b"")])),
}


@pytest.mark.parametrize("what", FITTING)
def test_takes(what: str) -> None:
    assert _check(*FITTING[what]) is None


UNFIT = {
    "wrong datatype": (FIXED, _tensor("FP64", [1, 2], 16), "input 'x' takes FP32 [1, 2]; FP64 [1, 2] came"),
    "wrong rank": (FIXED, _tensor("FP32", [2], 8), "FP32 [2] came"),
    "wrong dimension": (FIXED, _tensor("FP32", [1, 3], 12), "FP32 [1, 3] came"),
    "beyond the bound": (VARIES, _tensor("INT32", [5, 2], 40), "takes INT32 [-1, 2] up to [4, 2]; INT32 [5, 2] came"),
    "fewer bytes than the shape": (FIXED, _tensor("FP32", [1, 2], 7), "has 8 bytes, 7 came"),
    "more bytes than the shape": (FIXED, _tensor("FP32", [1, 2], 9), "has 8 bytes, 9 came"),
    "unknown name": (FIXED, _tensor("FP32", [1, 2], 8, "z"), "there is no input 'z'; m takes x"),
    "media for a plain tensor": (FIXED, _media("image/jpeg"), "no encoded media; image/jpeg came"),
    "audio for an image": (IMAGE, _media("audio/wav"), "takes image/jpeg or image/png; audio/wav came"),
    "unknown media": (AUDIO, _media("application/octet-stream"), "takes audio/wav"),
    "several media": (IMAGE, _media("image/png", shape=[2]), "takes one encoded medium"),
    "media beyond any size": (WORDS, _media("text/plain", size=1 << 20), "at most 65536 bytes"),
    "words beyond any size": (WORDS, _tensor("BYTES", [1], 1 << 20), "at most 65536 bytes"),
    "too many words": (WORDS, _tensor("BYTES", [9], 36), "BYTES [9] came"),
    "an image without rows": (IMAGE, _tensor("UINT8", [1, 0, 9, 3], 0), "UINT8 [1, 0, 9, 3] came"),
    "an image without columns": (IMAGE, _tensor("UINT8", [1, 9, 0, 3], 0), "UINT8 [1, 9, 0, 3] came"),
    "an empty batch": (VARIES, _tensor("INT32", [0, 2], 0), "INT32 [0, 2] came"),
    "nothing of an image": (IMAGE, _tensor("UINT8", [1, 65, 1, 3], 195), "up to [1, 64, 64, 3], or image/jpeg"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_refuses(what: str) -> None:
    spec, payload, text = UNFIT[what]
    assert text in (_check(spec, payload) or "")


def test_refuses_a_missing_and_a_repeated_input() -> None:
    model = _model(FIXED, TensorSpec("z", "FP32", [1]))
    one = _tensor("FP32", [1, 2], 8)
    refusal = check_inputs(model, oip.request_header(one), one)
    assert refusal is not None
    assert refusal.detail == "input 'z' is missing; m takes x, z"
    twice = oip.encode_request([("x", "FP32", [1, 2], bytes(8)), ("x", "FP32", [1, 2], bytes(8))])
    refusal = check_inputs(model, oip.request_header(twice), twice)
    assert refusal is not None
    assert "given 2 times" in refusal.detail


def test_state_is_not_the_callers_to_give() -> None:
    from tests.gateway.serving import LISTEN

    payload = oip.encode_request([("audio", "FP32", [1, 512], bytes(2048)), ("s", "FP32", [1], bytes(4))])
    refusal = check_inputs(LISTEN, oip.request_header(payload), payload)
    assert refusal is not None
    assert "there is no input 's'" in refusal.detail
