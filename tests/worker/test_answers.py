"""An answer's header is checked against its tensors, also where the one before had the same header."""

from __future__ import annotations

import pytest

from edgeinfer import oip
from edgeinfer.errors import ProtocolError
from edgeinfer.worker.answers import Answers

PAIR = oip.encode_response([("y", "UINT8", [2], b"\x01\x02"), ("z", "INT16", [1], b"\x03\x04")])


def body_of(*tensors: bytes) -> memoryview:
    return memoryview(b"".join(tensors))


def test_each_answer_has_its_own_tensors() -> None:
    answers = Answers()
    for one, other in ((b"\x01\x02", b"\x03\x04"), (b"\x05\x06", b"\x07\x08")):
        payload = answers.read(PAIR.header, body_of(one, other))
        assert [bytes(tensor) for tensor in payload.tensors] == [one, other]
        assert payload.header == PAIR.header


def test_same_header_with_other_tensors_is_checked_again() -> None:
    answers = Answers()
    answers.read(PAIR.header, body_of(*map(bytes, PAIR.tensors)))
    for wrong in (b"", b"\x01\x02\x03", b"\x01\x02\x03\x04\x05"):
        with pytest.raises(ProtocolError):
            answers.read(PAIR.header, body_of(wrong))


def test_another_header_is_another_answer() -> None:
    answers = Answers()
    answers.read(PAIR.header, body_of(*map(bytes, PAIR.tensors)))
    swapped = oip.encode_response([("y", "INT16", [1], b"\x03\x04"), ("z", "UINT8", [2], b"\x01\x02")])
    payload = answers.read(swapped.header, body_of(*map(bytes, swapped.tensors)))
    assert payload.header == swapped.header


def test_lengths_inside_a_tensor_are_looked_at_every_time() -> None:
    answers = Answers()
    good = oip.bytes_element(b"abc")
    text = oip.encode_response([("y", "BYTES", [1], good)])
    answers.read(text.header, body_of(good))
    answers.read(text.header, body_of(good))
    with pytest.raises(ProtocolError):
        answers.read(text.header, body_of(b"\xff" + good[1:]))
