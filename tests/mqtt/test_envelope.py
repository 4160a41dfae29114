"""Records are strict JSON both ways, whatever comes in and whatever is put in."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.errors import ProtocolError
from edgeinfer.mqtt import envelope
from edgeinfer.mqtt.envelope import MAX_RECORD_BYTES, Advert, Command, Event, Status, decode, encode
from edgeinfer.mqtt.stamp import Stamp

STAMP = Stamp(at="2026-01-01T00:00:00.000Z", clock_synced=True, boot="b", mono_ns=1)

BAD_COMMANDS = {
    "invalid utf-8": b"\xff\xfe{",
    "empty": b"",
    "a string": b'""',
    "a list": b"[]",
    "null": b"null",
    "no id": b"{}",
    "null id": b'{"id": null}',
    "10 MB of brackets": b"[" * 10_000_000,
    "deep nesting": b'{"id": "a", "args": ' + b'{"x": ' * 50_000,
    "deep nesting that ends": b'{"id": "a", "args": ' + b'{"x": ' * 20_000 + b"{}" + b"}" * 20_001,
    "NaN": b'{"id": "a", "args": {"x": NaN}}',
    "Infinity": b'{"id": "a", "args": {"x": Infinity}}',
    "a name twice": b'{"id": "a", "id": "b"}',
    "a name twice inside": b'{"id": "a", "args": {"x": 1, "x": 2}}',
    "an unknown field": b'{"id": "a", "argz": {}}',
    "wrong type": b'{"id": 7}',
    "trailing text": b'{"id": "a"} {"id": "b"}',
}


@pytest.mark.parametrize("payload", BAD_COMMANDS.values(), ids=BAD_COMMANDS.keys())
def test_bad_commands_are_refused_with_a_reason(payload: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(payload, Command)
    assert "Command" in str(caught.value)
    assert len(str(caught.value)) < 500


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(payload: bytes) -> None:
    kinds: tuple[type[msgspec.Struct], ...] = (Command, Advert, Status)
    for kind in kinds:
        try:
            decode(payload, kind)
        except ProtocolError:
            continue


numbers = st.floats() | st.integers(-(2**53), 2**53) | st.none() | st.booleans() | st.text()
values = st.recursive(numbers, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@pytest.mark.slow
@given(st.dictionaries(st.text(), values))
def test_any_numbers_make_strict_json(fields: dict[str, Any]) -> None:
    """NaN and infinity become null; a strict parser reads the rest back as it was."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    parsed = json.loads(encode(Event(STAMP, "x", "", fields)), parse_constant=refuse)
    assert parsed.get("fields", {}).keys() == fields.keys()


def test_non_finite_numbers_become_null() -> None:
    record = Event(STAMP, "x", "", {"p99_ms": float("nan"), "max": float("inf")})
    assert json.loads(encode(record))["fields"] == {"p99_ms": None, "max": None}


def test_records_come_back_as_they_were() -> None:
    status = Status(online=True, stamp=STAMP, version="1.0")
    assert decode(encode(status), Status) == status
    command = Command("id-1", {"loop": "camera", "period_ms": 40}, "2026-01-01T00:00:00+01:00", 60.0)
    assert decode(encode(command), Command) == command


def test_an_older_reader_understands_a_newer_writer() -> None:
    newer = json.loads(encode(Advert(online=True, stamp=STAMP))) | {"colour": "blue"}
    assert decode(json.dumps(newer).encode(), Advert).online


def test_long_records_are_refused_unread() -> None:
    with pytest.raises(ProtocolError, match=str(MAX_RECORD_BYTES)):
        decode(b'{"id": "' + b"x" * MAX_RECORD_BYTES + b'"}', Command)


def test_a_record_that_no_reader_would_read_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    envelope._told.clear()
    long = Status(online=True, stamp=STAMP, reason="x" * MAX_RECORD_BYTES)
    encode(Status(online=True, stamp=STAMP))
    assert not caplog.records
    encode(long)
    encode(long)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "Status of" in caplog.text
