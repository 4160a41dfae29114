"""The reader of heads, held against h11: what it takes h11 takes as the same, and what h11 refuses it refuses."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.gateway.head import BadRequest, Head, parse_chunk, parse_head

WHOLE = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nX-Y: a\r\nx-y:  b \r\n\r\n"


def test_says_what_was_said() -> None:
    head = parse_head(WHOLE)
    assert (head.method, head.target) == ("POST", "/v2/models/m/infer")
    assert head.headers == {"host": "x", "content-length": "5", "x-y": "a, b"}
    assert (head.body_bytes, head.keeps, head.waits) == (5, True, False)


@pytest.mark.parametrize(
    ("said", "body_bytes", "keeps", "waits"),
    [
        (b"", 0, True, False),
        (b"transfer-encoding: Chunked\r\n", None, True, False),
        (b"connection: Keep-Alive, Close\r\n", 0, False, False),
        (b"expect: 100-Continue\r\ncontent-length: 9\r\n", 9, True, True),
    ],
)
def test_where_the_body_ends_and_what_comes_after(
    said: bytes, body_bytes: int | None, keeps: bool, waits: bool
) -> None:
    head = parse_head(b"GET /v2 HTTP/1.1\r\nhost: x\r\n" + said + b"\r\n")
    assert (head.body_bytes, head.keeps, head.waits) == (body_bytes, keeps, waits)


REFUSED = {
    "two lengths": b"content-length: 5\r\ncontent-length: 5\r\n",
    "a length and chunks": b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
    "another coding": b"transfer-encoding: gzip, chunked\r\n",
    "a coding twice": b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
    "a signed length": b"content-length: +5\r\n",
    "a length in other digits": "content-length: \u0665\r\n".encode(),
    "a length and spaces inside": b"content-length: 5 5\r\n",
    "a space before the colon": b"content-length : 5\r\n",
    "a folded line": b"x: a\r\n b\r\n",
    "a bare line feed": b"x: a\ncontent-length: 5\r\n",
    "a bare carriage return": b"x: a\rcontent-length: 5\r\n",
    "a zero byte": b"x: a\0\r\n",
    "no name": b": a\r\n",
    "no colon": b"abc\r\n",
    "two hosts": b"host: y\r\n",
    "an unknown expectation": b"expect: a miracle\r\n",
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses_what_others_might_read_otherwise(what: str) -> None:
    with pytest.raises(BadRequest):
        parse_head(b"POST /v2 HTTP/1.1\r\nhost: x\r\n" + REFUSED[what] + b"\r\n")


@pytest.mark.parametrize(
    "line",
    [b"GET  / HTTP/1.1", b"GET / HTTP/2.0", b"GET /", b" GET / HTTP/1.1", b"GET /\x80 HTTP/1.1", b"G@T / HTTP/1.1"],
)
def test_refuses_a_first_line_that_is_none(line: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_head(line + b"\r\nhost: x\r\n\r\n")


PIECES = [
    b"GET /v2 HTTP/1.1\r\n", b"POST /v2/models/m/infer HTTP/1.1\r\n", b"GET / HTTP/1.0\r\n", b"host: x\r\n", b"Host:y\r\n",
    b"content-length: 5\r\n", b"Content-Length: 0\r\n", b"content-length: 5, 5\r\n", b"transfer-encoding: chunked\r\n",
    b"Transfer-Encoding: identity\r\n", b"connection: close\r\n", b"expect: 100-continue\r\n", b"x-y: \xe9\t \r\n",
    b" folded\r\n", b"a b: c\r\n", b"x:\r\n", b"\n", b"\r", b"\r\n",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=6), max_size=7).map(b"".join))
def test_what_is_taken_is_what_h11_reads(raw: bytes) -> None:
    whole = raw + b"\r\n"
    if whole.find(b"\r\n\r\n") != len(whole) - 4:
        return
    try:
        head = parse_head(whole)
    except BadRequest:
        return
    other = h11.Connection(h11.SERVER)
    other.receive_data(whole)
    try:
        event = other.next_event()
    except h11.RemoteProtocolError as error:
        # h11 refuses one thing that HTTP allows and nobody reads in two ways
        raise AssertionError(f"h11 refuses {whole!r}: {error}") from error
    assert isinstance(event, h11.Request)
    assert (head.method.encode(), head.target.encode()) == (event.method, event.target)
    assert _framing(head) == _framing_of(event)


def _framing(head: Head) -> tuple[str | None, str | None]:
    return head.headers.get("content-length"), head.headers.get("transfer-encoding", "").lower() or None


def _framing_of(event: h11.Request) -> tuple[str | None, str | None]:
    said = {name.decode(): value.decode("latin-1") for name, value in event.headers}
    return said.get("content-length"), said.get("transfer-encoding", "").lower() or None


@pytest.mark.parametrize(
    ("line", "size"), [(b"0\r\n", 0), (b"1F\r\n", 31), (b"a ;x=y\r\n", 10), (b"ffffffff\r\n", (1 << 32) - 1)]
)
def test_reads_the_size_of_a_chunk(line: bytes, size: int) -> None:
    assert parse_chunk(line) == size


@pytest.mark.parametrize("line", [b"\r\n", b"-1\r\n", b"0x5\r\n", b"5\n", b" 5\r\n", b"5 5\r\n", b"123456789\r\n"])
def test_refuses_a_chunk_without_a_size(line: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_chunk(line)


def test_a_long_head_costs_no_more_than_its_length() -> None:
    """Spaces are what makes patterns go back and forth."""
    with pytest.raises(BadRequest):
        parse_head(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: " + b" " * 200_000 + b"\0\r\n\r\n")
