"""Asks and answers come back as they were; anything else is a protocol error, never another exception."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from edgeinfer.errors import ProtocolError
from edgeinfer.mqtt.exchange import (
    ANSWER_PROPERTIES,
    ASK_PROPERTIES,
    MAX_BUDGET_NS,
    Answer,
    Ask,
    cancelled,
    decode_answer,
    decode_ask,
    encode_answer,
    encode_ask,
    encode_cancel,
)
from edgeinfer.mqtt.message import Message, packet_bytes
from edgeinfer.request import DataScope, OutcomeKind, Payload

names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
correlations = st.binary(min_size=1, max_size=64)
payloads = st.builds(Payload, st.binary(min_size=1, max_size=50), st.tuples(st.binary(max_size=50)))


@given(
    st.builds(
        Ask, model=names, digest=names, scope=st.sampled_from(DataScope), budget_ns=st.integers(0, MAX_BUDGET_NS),
        correlation=correlations, trip_ns=st.none() | st.integers(0, 10 * NS_PER_S),
        priority=st.integers(-1000, 1000), accept_late=st.booleans(),
    ),
    payloads,
)  # fmt: skip
def test_an_ask_comes_back_as_it_was(ask: Ask, payload: Payload) -> None:
    message = encode_ask(ask, payload, topic="t", response_topic="r")
    back = decode_ask(message)
    assert bytes(back.header) == payload.header
    assert bytes(back.tensors) == b"".join(bytes(tensor) for tensor in payload.tensors)
    assert abs(back.budget_ns - ask.budget_ns) <= NS_PER_US
    if ask.trip_ns is not None and back.trip_ns is not None:
        assert abs(back.trip_ns - ask.trip_ns) <= NS_PER_US
    again = replace(back, header=b"", tensors=b"", budget_ns=ask.budget_ns, trip_ns=ask.trip_ns)
    assert again == ask
    assert message.expiry_s is not None
    assert message.expiry_s * NS_PER_S >= ask.budget_ns
    assert {name for name, _ in message.user} <= set(ASK_PROPERTIES)


@given(
    st.builds(
        Answer, outcome=st.sampled_from(OutcomeKind), correlation=correlations, reason=names, detail=names,
        version=names, variant=names, digest=names, queue_ns=st.integers(0, NS_PER_S), run_ns=st.integers(0, NS_PER_S),
    ),
    payloads,
)  # fmt: skip
def test_an_answer_comes_back_as_it_was(answer: Answer, payload: Payload) -> None:
    message = encode_answer(answer, payload, topic="t", expiry_s=1)
    back = decode_answer(message)
    assert (back.outcome, back.correlation, back.reason, back.detail) == (
        answer.outcome, answer.correlation, answer.reason, answer.detail,
    )  # fmt: skip
    assert 0 <= answer.run_ns - back.run_ns < NS_PER_US
    if answer.outcome in {OutcomeKind.OK, OutcomeKind.LATE}:
        assert (bytes(back.header), back.digest) == (payload.header, answer.digest)
    assert {name for name, _ in message.user} <= set(ANSWER_PROPERTIES)


user_properties = st.lists(
    st.tuples(st.sampled_from([*ASK_PROPERTIES, *ANSWER_PROPERTIES]), st.text(max_size=30) | st.just("ok")), max_size=12
)


@given(user_properties, st.none() | st.binary(max_size=80), st.binary(max_size=30))
def test_no_message_raises_anything_but_a_protocol_error(
    user: list[tuple[str, str]], correlation: bytes | None, payload: bytes
) -> None:
    message = Message("t", payload, correlation=correlation, user=tuple(user))
    for read in (decode_ask, decode_answer):
        try:
            read(message)
        except ProtocolError as error:
            assert len(str(error)) < 300  # noqa: PT017


@pytest.mark.parametrize("value", ["", "nan", "inf", "-1", "1e3", "1_000", "٢", "1.", ".5", "9" * 30, "3600000.1"])
def test_absurd_budgets_are_refused(value: str) -> None:
    ask = Ask("m", "d", DataScope.SITE, NS_PER_MS, b"c")
    message = encode_ask(ask, Payload(b"{}"), topic="t", response_topic="r")
    user = tuple((name, value if name == "budget-ms" else old) for name, old in message.user)
    with pytest.raises(ProtocolError, match="budget-ms"):
        decode_ask(replace(message, user=user))


def test_a_cancellation_is_told_from_an_ask() -> None:
    assert cancelled(encode_cancel(b"c", topic="t")) == b"c"
    ask = encode_ask(Ask("m", "d", DataScope.SITE, NS_PER_MS, b"c"), Payload(b"{}"), topic="t", response_topic="r")
    assert cancelled(ask) is None


@given(st.binary(max_size=300), st.integers(0, 1), st.lists(st.tuples(names, names), max_size=3))
def test_the_packet_size_is_known_exactly(payload: bytes, qos: int, user: list[tuple[str, str]]) -> None:
    """Against MQTT 5, section 3.3, computed by hand."""
    message = Message("topic", payload, qos, user=tuple(user), correlation=b"12", expiry_s=5)
    properties = 5 + 5 + sum(1 + 2 + len(name) + 2 + len(value) for name, value in user)
    rest = 2 + 5 + 2 * qos + (1 if properties < 128 else 2) + properties + len(payload)
    assert packet_bytes(message) == 1 + (1 if rest < 128 else 2) + rest


@given(st.text(max_size=600))
def test_any_detail_can_be_carried(detail: str) -> None:
    """It may quote what a device sent: NUL, surrogates, control characters."""
    answer = Answer(OutcomeKind.REJECTED, b"c", "input_invalid", detail)
    message = encode_answer(answer, None, topic="t", expiry_s=1)
    assert packet_bytes(message) < 4096
    said = decode_answer(message).detail
    assert said.isprintable()
    assert len(said) == min(len(detail), 512)
