from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from edgeinfer_bench.asking import Answers, Server, Stream, content_length, play, to_socket
from edgeinfer_bench.player import Sent

MS = 1_000_000


def job(at_ms: int, due_ms: int) -> Sent:
    return Sent(at_ms * MS, due_ms * MS, 7, 1000, firm=True)


async def asked(path: Path, jobs: list[Sent], *, answer_ms: float, status: int = 200, connections: int = 1) -> Answers:
    """Play against a server that answers everything alike."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1):
            await asyncio.sleep(answer_ms / 1000)
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: 2\r\n\r\nok".encode())
        writer.close()

    async def connect() -> Stream:
        return await to_socket(str(path))

    def request(job: Sent, left_ns: int) -> Sequence[bytes]:
        assert 0 < left_ns <= job.due_ns
        return (b"?",)

    async with await asyncio.start_unix_server(converse, path):
        return await play(Server(connect, request, connections), jobs)


async def test_what_is_answered_in_time_is_worth_its_service_time(tmp_path: Path) -> None:
    found = await asked(tmp_path / "s", [job(0, 5000), job(1, 5000)], answer_ms=0)
    assert found == Answers(on_time_ns=14, in_time=2)


async def test_the_deadline_counts_from_when_the_job_was_to_be_sent(tmp_path: Path) -> None:
    # One connection: the second waits for the first and is late, the third is due before it could be sent.
    found = await asked(tmp_path / "s", [job(0, 5000), job(0, 110), job(0, 30)], answer_ms=80)
    assert (found.in_time, found.late, found.unsent) == (1, 1, 1)


async def test_a_refusal_is_no_answer_however_early(tmp_path: Path) -> None:
    found = await asked(tmp_path / "s", [job(0, 5000)], answer_ms=0, status=503)
    assert found == Answers(refused=1)


async def test_a_server_that_hangs_up_is_an_error(tmp_path: Path) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def connect() -> Stream:
        return await to_socket(str(tmp_path / "s"))

    async with await asyncio.start_unix_server(hang_up, tmp_path / "s"):
        with pytest.raises(ExceptionGroup) as caught:
            await play(Server(connect, lambda *_: (b"?",), 1), [job(0, 5000)])
    assert caught.group_contains(OSError)


def test_a_reply_without_a_length_is_refused() -> None:
    assert content_length(b"HTTP/1.1 200 OK\r\nCONTENT-LENGTH:  12\r\n\r\n") == 12
    with pytest.raises(ValueError, match="Content-Length"):
        content_length(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
