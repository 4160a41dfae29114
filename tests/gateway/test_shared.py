"""Tensors in callers' shared memory, registered over the real socket: what is read, and what a hostile caller gets."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.gateway.bounds import Bounds
from tests.gateway.serving import ScriptedSubmit, serving
from tests.gateway.test_gateway import _eventually

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Sharer:
    """A caller that passes descriptors."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    async def ask(
        self, path: str, body: Any = None, fds: tuple[int, ...] = (), method: str = "POST"
    ) -> tuple[int, Any]:
        raw = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
        socket.send_fds(self.sock, [head + raw], list(fds))
        answer = b""
        loop = asyncio.get_running_loop()
        while b"\r\n\r\n" not in answer or len(answer) < _length(answer):
            got = await asyncio.wait_for(loop.sock_recv(self.sock, 65536), 5)
            assert got, answer
            answer += got
        return int(answer[9:12]), json.loads(answer.partition(b"\r\n\r\n")[2])

    async def register(self, fd: int, size: int, name: str = "in", offset: int = 0) -> tuple[int, Any]:
        body = {"key": "k", "byte_size": size, "offset": offset}
        return await self.ask(f"/v2/systemsharedmemory/region/{name}/register", body, (fd,))

    async def infer(self, size: int, shape: list[int], name: str = "in", **more: Any) -> tuple[int, Any]:
        where = {"shared_memory_region": name, "shared_memory_byte_size": size, **more}
        tensor = {"name": "x", "datatype": "FP32", "shape": shape, "parameters": where}
        return await self.ask("/v2/models/double/infer", {"inputs": [tensor]})


def _length(answer: bytes) -> int:
    head, _, _ = answer.partition(b"\r\n\r\n")
    (line,) = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    return len(head) + 4 + int(line.split()[1])


@contextlib.asynccontextmanager
async def sharing(path: Path) -> AsyncIterator[Sharer]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        sock.connect(str(path))
        yield Sharer(sock)


@contextlib.contextmanager
def memory(data: bytes, seals: int = SEALS) -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


ONES = bytes([0, 0, 0x80, 0x3F]) * 4


async def test_a_tensor_is_read_where_it_lies_each_time_anew() -> None:
    async with serving(ScriptedSubmit()) as (_, path), sharing(path) as caller:
        with memory(ONES) as fd:
            assert await caller.register(fd, 16) == (200, {})
            assert (await caller.infer(16, [2, 2]))[1]["outputs"][0]["data"] == [2, 2, 2, 2]
            os.pwrite(fd, bytes(4), 0)
            assert (await caller.infer(16, [2, 2]))[1]["outputs"][0]["data"] == [0, 2, 2, 2]
            assert (await caller.infer(8, [1, 2], shared_memory_offset=8))[1]["outputs"][0]["data"] == [2, 2]
            status, regions = await caller.ask("/v2/systemsharedmemory/status", method="GET")
            assert (status, regions) == (200, [{"name": "in", "key": "", "offset": 0, "byte_size": 16}])
            assert (await caller.ask("/v2/systemsharedmemory/region/in/unregister"))[0] == 200
            status, answer = await caller.infer(16, [2, 2])
            assert (status, answer["reason"]) == (400, "input_invalid")
            assert "no region 'in' on this connection" in answer["detail"]


async def test_an_output_in_shared_memory_is_refused_before_the_run() -> None:
    """What the daemon writes there is charged to the daemon, for as long as the caller keeps it."""
    submit = ScriptedSubmit()
    async with serving(submit) as (gateway, path), sharing(path) as caller:
        with memory(bytes(64)) as fd:
            assert (await caller.register(fd, 64, "out"))[0] == 200
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
            place = {"shared_memory_region": "out", "shared_memory_byte_size": 8, "shared_memory_offset": 32}
            for where in (place, place | {"shared_memory_byte_size": 4}, {"shared_memory_region": "none"}):
                request = {"inputs": [tensor], "outputs": [{"name": "y", "parameters": where}]}
                status, answer = await caller.ask("/v2/models/double/infer", request)
                assert (status, answer["reason"]) == (400, "input_invalid")
                assert "leave shared_memory_region out" in answer["detail"]
            assert not any(os.pread(fd, 64, 0))
            assert os.fstat(fd).st_blocks * 512 <= 4096
        assert (submit.tickets, gateway.snapshot().refused) == ([], {"input_invalid": 3})


async def test_regions_belong_to_their_connection_and_end_with_it() -> None:
    async with serving(ScriptedSubmit()) as (gateway, path), sharing(path) as other:
        assert (await other.ask("/v2", method="GET"))[0] == 200
        have = _descriptors()
        with memory(ONES) as fd:
            async with sharing(path) as caller:
                for number in range(20):
                    status, _ = await caller.register(fd, 16, f"r{number}")
                    assert status == (200 if number < Bounds().regions else 400)
                assert (await caller.register(fd, 8, "r0"))[0] == 200, "a name may be given anew"
                assert (await other.infer(16, [2, 2], "r0"))[0] == 400
        await _eventually(lambda: gateway.snapshot().connections == 1)
        assert _descriptors() == have


async def _registered(caller: Sharer, fd: int, size: int, **more: Any) -> str:
    status, answer = await caller.register(fd, size, **more)
    assert status == 400
    return str(answer["error"])


async def test_only_sealed_memory_of_that_size_is_taken(tmp_path: Path) -> None:
    async with serving(ScriptedSubmit()) as (_, path), sharing(path) as caller:
        assert (await caller.ask("/v2", method="GET"))[0] == 200
        have = _descriptors()
        with memory(ONES, 0) as fd:
            assert "not sealed against shrinking" in await _registered(caller, fd, 16)
        with memory(ONES, fcntl.F_SEAL_SHRINK) as fd:
            assert "not sealed" in await _registered(caller, fd, 16)
        with memory(ONES) as fd:
            for size, offset in ((17, 0), (16, 1), (0, 0), (-1, 0), (8, -8)):
                assert "do not lie inside" in await _registered(caller, fd, size, offset=offset)
        (tmp_path / "file").write_bytes(ONES)
        with (tmp_path / "file").open("rb") as file:
            assert "region 'in'" in await _registered(caller, file.fileno(), 16)
        ends = os.pipe()
        assert "no memfd" in await _registered(caller, ends[0], 16)
        for end in ends:
            os.close(end)
        register = "/v2/systemsharedmemory/region/in/register"
        assert (await caller.ask(register, {"byte_size": 1}))[0] == 400
        with memory(ONES) as fd:
            assert (await caller.ask(register, {"byte_size": 16}, (fd, fd)))[0] == 400
            assert (await caller.ask("/v2", method="GET", fds=(fd, fd, fd)))[0] == 200
            assert (await caller.ask(register, {"byte_size": "x"}, (fd,)))[0] == 400
            assert (await caller.ask(register, ["no"], (fd,) * 20))[0] == 400
        assert _descriptors() == have, "what was passed is closed"


async def test_a_registration_that_is_sent_ahead_keeps_its_descriptor() -> None:
    ask = b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n"
    said = b'{"byte_size": 16}'
    head = b"POST /v2/systemsharedmemory/region/%b/register HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    infer = b"POST /v2/models/listen/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
    async with serving(ScriptedSubmit(delay_s=0.05)) as (_, path), sharing(path) as caller:
        assert (await caller.ask("/v2", method="GET"))[0] == 200
        have = _descriptors()
        with memory(ONES) as fd:
            for before in (ask, infer, ask * 3):
                socket.send_fds(caller.sock, [before + head % (b"in", len(said)) + said], [fd])
                answer = b""
                for _ in range(100):
                    await asyncio.sleep(0.005)
                    with contextlib.suppress(BlockingIOError):
                        answer += caller.sock.recv(65536)
                    if answer.count(b"HTTP/1.1 ") > before.count(b"HTTP/1.1"):
                        break
                assert answer.endswith(b"{}"), answer
                assert (await caller.infer(16, [2, 2]))[0] == 200
                assert (await caller.ask("/v2/systemsharedmemory/unregister"))[0] == 200
        assert _descriptors() == have


async def test_a_caller_that_spoils_its_memory_gets_an_answer_and_harms_nobody() -> None:
    async with serving(ScriptedSubmit()) as (gateway, path), sharing(path) as caller:
        with memory(ONES * (1 << 16)) as fd:
            assert (await caller.register(fd, 1 << 20))[0] == 200
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 0)
            _punch(fd, 1 << 20)
            assert (await caller.infer(16, [2, 2]))[1]["outputs"][0]["data"] == [0, 0, 0, 0]
            for size, shape in ((24, [2, 2]), (1 << 21, [1 << 18, 2]), (-4, [2, 2]), (1 << 62, [2, 2])):
                status, answer = await caller.infer(size, shape)
                assert (status, answer["reason"]) == (400, "input_invalid"), answer
            assert (await caller.infer(16, [2, 2], shared_memory_offset=(1 << 20) - 8))[0] == 400
            assert (await caller.infer(True, [2, 2]))[0] == 400
        assert gateway.snapshot().faults == 0


def _punch(fd: int, size: int) -> None:
    """Give a file's memory back, its size kept (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE)."""
    assert ctypes.CDLL(None).fallocate(fd, 0x02 | 0x01, ctypes.c_long(0), ctypes.c_long(size)) == 0


async def test_what_is_read_from_shared_memory_counts_as_in_flight() -> None:
    submit = ScriptedSubmit(delay_s=0.3)
    async with (
        serving(submit, bounds=Bounds(body_bytes_in_flight=1000)) as (_, path),
        sharing(path) as one,
        sharing(path) as two,
    ):
        with memory(bytes(2400)) as fd:
            for caller in (one, two):
                assert (await caller.register(fd, 2400))[0] == 200
            first = asyncio.create_task(one.infer(480, [60, 2]))
            await _eventually(lambda: submit.tickets)
            status, answer = await two.infer(480, [60, 2])
            assert (status, answer["reason"]) == (429, "queue_full")
            assert (await first)[0] == 200
            assert (await two.infer(480, [60, 2]))[0] == 200
            status, answer = await two.infer(2400, [300, 2])
            assert (status, "raise memory.ceiling" in answer["error"]) == (413, True)
