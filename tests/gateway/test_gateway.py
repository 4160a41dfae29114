"""The gateway over its real socket, spoken to in raw HTTP where that matters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeinfer import oip
from edgeinfer.clock import LoopClock
from edgeinfer.errors import LinkError
from edgeinfer.gateway.bounds import Bounds
from edgeinfer.gateway.gateway import Gateway
from edgeinfer.request import Ending, Expired, InferRequest, Placement, Reason, Refusal, Result
from tests.gateway.serving import DIGEST, ScriptedSubmit, ScriptedTicket, run_model, serving


class Caller:
    """A plain HTTP caller that shows everything."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> None:
        lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await self.writer.drain()

    async def receive(self) -> tuple[int, dict[str, str], bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, body

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
        await self.send(method, path, body, **headers)
        status, _, answer = await self.receive()
        return status, json.loads(answer)


@contextlib.asynccontextmanager
async def calling(path: Path) -> Any:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        yield Caller(reader, writer)
    finally:
        writer.close()


DOUBLE_BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2.5]}]}).encode()


async def test_documents() -> None:
    async with serving(ScriptedSubmit(), status={"ready": True, "level": "warm"}) as (_, path), calling(path) as caller:
        status, server = await caller.ask("GET", "/v2")
        assert (status, server["name"]) == (200, "edgeinfer")
        assert "binary_tensor_data" in server["extensions"]
        assert await caller.ask("GET", "/v2/health/live") == (200, {"live": True})
        assert await caller.ask("GET", "/v2/health/ready") == (200, {"ready": True})
        assert await caller.ask("GET", "/status") == (200, {"ready": True, "level": "warm"})
        status, models = await caller.ask("GET", "/v2/models")
        assert [model["name"] for model in models] == ["support-intent", "double", "camera", "listen"]
        assert await caller.ask("POST", "/v2/repository/index", b"{}") == (200, models)
        status, model = await caller.ask("GET", "/v2/models/camera/versions/1.0.0")
        assert status == 200
        assert model["inputs"] == [{
            "name": "image", "datatype": "UINT8", "shape": [1, -1, -1, 3],
            "parameters": {"max_shape": [1, 64, 64, 3], "decode": "image"},
        }]  # fmt: skip
        assert model["parameters"]["digest"] == DIGEST
        assert (await caller.ask("GET", "/v2/models/camera/ready"))[0] == 200


UNKNOWN: dict[str, tuple[str, str, int]] = {
    "path": ("GET", "/nothing", 404),
    "part of a model": ("GET", "/v2/models/camera/nothing", 404),
    "model": ("GET", "/v2/models/nope", 404),
    "model to infer": ("POST", "/v2/models/nope/infer", 404),
    "version": ("POST", "/v2/models/camera/versions/9.9.9/infer", 404),
    "method": ("DELETE", "/v2/models/camera", 405),
    "method to infer": ("GET", "/v2/models/camera/infer", 405),
}


@pytest.mark.parametrize("what", UNKNOWN)
async def test_unknown(what: str) -> None:
    method, target, expected = UNKNOWN[what]
    submit = ScriptedSubmit()
    async with serving(submit) as (_, path), calling(path) as caller:
        status, answer = await caller.ask(method, target)
        assert status == expected
        assert answer["error"]
    assert not submit.tickets


async def test_not_ready_is_said() -> None:
    async with serving(ScriptedSubmit(), status={"ready": False}) as (_, path), calling(path) as caller:
        assert await caller.ask("GET", "/v2/health/ready") == (503, {"ready": False})


async def test_infers_in_json_and_in_binary_on_one_connection() -> None:
    async with serving(ScriptedSubmit()) as (gateway, path), calling(path) as caller:
        status, answer = await caller.ask("POST", "/v2/models/double/infer", DOUBLE_BODY)
        assert status == 200
        assert answer["outputs"][0]["data"] == [2, 5]
        payload = oip.encode_request([("x", "FP32", [1, 2], bytes(8))], parameters={"binary_data_output": True})
        length = str(len(payload.header))
        await caller.send("POST", "/v2/models/double/infer", oip.join(payload), inference_header_content_length=length)
        status, headers, body = await caller.receive()
        header, answered = oip.decode_response(*oip.split(body, int(headers["inference-header-content-length"])))
        assert [tensor.name for tensor in header.outputs] == ["y", "n"]
        assert bytes(answered.tensors[0]) == bytes(8)
        assert gateway.snapshot().submitted == 2


async def test_a_body_in_chunks_and_one_that_waits_to_be_asked_for() -> None:
    async with serving(ScriptedSubmit()) as (_, path), calling(path) as caller:
        head = "POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\n"
        chunk = f"{len(DOUBLE_BODY):x}\r\n".encode() + DOUBLE_BODY + b"\r\n0\r\n\r\n"
        caller.writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode() + chunk)
        assert (await caller.receive())[0] == 200
        caller.writer.write(f"{head}expect: 100-continue\r\ncontent-length: {len(DOUBLE_BODY)}\r\n\r\n".encode())
        assert b"100" in await caller.reader.readuntil(b"\r\n\r\n")
        caller.writer.write(DOUBLE_BODY)
        assert (await caller.receive())[0] == 200


@pytest.mark.parametrize(
    ("target", "length", "status"), [("/v2/models/nope/infer", 9, 404), ("/v2/models/double/infer", 1 << 40, 413)]
)
async def test_a_body_that_waits_to_be_asked_for_is_not_asked_for_in_vain(
    target: str, length: int, status: int
) -> None:
    async with serving(ScriptedSubmit()) as (_, path), calling(path) as caller:
        head = f"POST {target} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {length}\r\n\r\n"
        caller.writer.write(head.encode())
        assert (await caller.receive())[0] == status, "and not 100"


async def test_speaks_to_callers_of_http_1_0() -> None:
    async with serving(ScriptedSubmit()) as (_, path), calling(path) as caller:
        caller.writer.write(b"GET /v2/health/live HTTP/1.0\r\n\r\n")
        answer = await asyncio.wait_for(caller.reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"connection: close\r\n" in answer


async def test_requests_sent_ahead_are_answered_in_order() -> None:
    async with serving(ScriptedSubmit(delay_s=0.01)) as (_, path), calling(path) as caller:
        for number in range(5):
            body = DOUBLE_BODY.replace(b"2.5", str(number).encode())
            await caller.send("POST", "/v2/models/double/infer", body)
        answers = [json.loads((await caller.receive())[2])["outputs"][0]["data"][1] for _ in range(5)]
        assert answers == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("reason", [Reason.THERMAL, Reason.QUEUE_FULL, Reason.DEADLINE_UNREACHABLE])
async def test_a_refusal_of_the_scheduler_reaches_the_caller(reason: Reason) -> None:
    submit = ScriptedSubmit(lambda _: Refusal(reason, "81 C"))
    async with serving(submit) as (_, path), calling(path) as caller:
        status, answer = await caller.ask("POST", "/v2/models/double/infer", DOUBLE_BODY)
        assert status in {503, 429, 504}
        assert (answer["outcome"], answer["reason"], answer["detail"]) == ("rejected", reason.value, "81 C")


async def test_what_does_not_fit_the_manifest_never_reaches_the_scheduler() -> None:
    submit = ScriptedSubmit()
    async with serving(submit) as (gateway, path), calling(path) as caller:
        status, answer = await caller.ask("POST", "/v2/models/double/infer", DOUBLE_BODY.replace(b'"x"', b'"z"'))
        assert (status, answer["reason"]) == (400, "input_invalid")
        assert "there is no input 'z'; double takes x" in answer["error"]
        assert gateway.snapshot().refused == {"input_invalid": 1}
    assert not submit.tickets


async def _eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_caller_that_hangs_up_has_its_request_cancelled() -> None:
    submit = ScriptedSubmit(delay_s=30)
    async with serving(submit) as (gateway, path):
        async with calling(path) as caller:
            await caller.send("POST", "/v2/models/double/infer", DOUBLE_BODY)
            await _eventually(lambda: submit.tickets)
        await _eventually(lambda: submit.tickets[0].done)
        assert submit.tickets[0].cancelled.is_set()
        await _eventually(lambda: gateway.snapshot().connections == 0)
        assert gateway.snapshot().abandoned == 1


class _CountedLease:
    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


async def test_every_lease_is_given_back_once_even_when_nobody_reads() -> None:
    leases: list[_CountedLease] = []

    def large(request: InferRequest) -> Ending:
        leases.append(_CountedLease())
        payload = oip.encode_response([("y", "FP32", [1 << 20, 2], bytes(8 << 20))])
        return Result(payload, Placement.LOCAL, "d", "1.0.0", "fp32", lease=leases[-1])

    body = DOUBLE_BODY[:-1] + b', "parameters": {"binary_data_output": true}}'
    async with serving(ScriptedSubmit(large), bounds=Bounds(write_s=0.2)) as (gateway, path):
        async with calling(path) as caller:
            await caller.send("POST", "/v2/models/double/infer", body)
            await _eventually(lambda: leases)
            await asyncio.sleep(0.05)
            assert not leases[0].released, "given back while the answer was still being sent"
            status, _, answer = await caller.receive()
            assert (status, len(answer) > 8 << 20) == (200, True)
        async with calling(path) as deaf:
            await deaf.send("POST", "/v2/models/double/infer", body)
            await _eventually(lambda: len(leases) == 2 and leases[1].released)
        await _eventually(lambda: gateway.snapshot().connections == 0)
    assert [lease.released for lease in leases] == [1, 1]


async def test_bounds_connections() -> None:
    async with serving(ScriptedSubmit(), bounds=Bounds(connections=2)) as (gateway, path):
        async with calling(path) as one, calling(path) as two:
            assert (await one.ask("GET", "/v2"))[0] == (await two.ask("GET", "/v2"))[0] == 200
            async with calling(path) as three:
                status, _, answer = await three.receive()
                assert status == 503
                assert b"2 connections are open" in answer
        await _eventually(lambda: gateway.snapshot().connections == 0)
        async with calling(path) as again:
            assert (await again.ask("GET", "/v2"))[0] == 200


async def test_bounds_a_body_by_what_the_model_can_take() -> None:
    async with serving(ScriptedSubmit()) as (_, path), calling(path) as caller:
        caller.writer.write(
            b"POST /v2/models/support-intent/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n"
            b"inference-header-content-length: 95\r\n\r\n"
            b'{"inputs":[{"name":"text","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":9}}]}'
            + bytes(2 << 20)
        )
        status, headers, answer = await caller.receive()
        assert status == 413
        assert headers["connection"] == "close"
        assert b"which no valid request has" in answer


async def test_bounds_all_bodies_in_flight_together() -> None:
    bounds = Bounds(body_bytes_in_flight=1000)
    submit = ScriptedSubmit(delay_s=0.3)
    async with serving(submit, bounds=bounds) as (_, path), calling(path) as one, calling(path) as two:
        body = DOUBLE_BODY + b" " * 700
        await one.send("POST", "/v2/models/double/infer", body)
        await _eventually(lambda: submit.tickets)
        status, answer = await two.ask("POST", "/v2/models/double/infer", body)
        assert status == 429
        assert "in flight" in answer["error"]
        assert (await one.receive())[0] == 200
        assert (await one.ask("POST", "/v2/models/double/infer", body))[0] == 200


async def test_a_body_that_does_not_come_on_keeps_no_room_from_others() -> None:
    bounds = Bounds(body_bytes_in_flight=1000, stall_s=0.05)
    body = DOUBLE_BODY + b" " * 500
    async with serving(ScriptedSubmit(), bounds=bounds) as (_, path), calling(path) as stalled, calling(path) as two:
        stalled.writer.write(b"POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n{")
        await asyncio.sleep(0.01)
        assert (await two.ask("POST", "/v2/models/double/infer", body))[0] == 429
        await asyncio.sleep(0.06)
        assert (await two.ask("POST", "/v2/models/double/infer", body))[0] == 200
        assert (await stalled.receive())[0] == 408


async def test_at_the_limit_the_longest_idle_connection_makes_way() -> None:
    bounds = Bounds(connections=3, spare_s=0.05)
    async with serving(ScriptedSubmit(delay_s=0.5), bounds=bounds) as (gateway, path):  # noqa: SIM117
        async with calling(path) as busy, calling(path) as first, calling(path) as second:
            assert (await first.ask("GET", "/v2"))[0] == 200
            assert (await second.ask("GET", "/v2"))[0] == 200
            await busy.send("POST", "/v2/models/double/infer", DOUBLE_BODY)
            await asyncio.sleep(0.1)
            async with calling(path) as app:
                assert (await app.ask("GET", "/v2"))[0] == 200
                assert await asyncio.wait_for(first.reader.read(), 5) == b""
                assert gateway.snapshot().connections == 3
                assert (await second.ask("GET", "/v2"))[0] == 200
            assert (await busy.receive())[0] == 200, "one with a request is never closed for another"


async def test_at_the_limit_a_body_that_does_not_come_on_makes_way_and_one_that_does_stays() -> None:
    bounds = Bounds(connections=2, spare_s=0.05, stall_s=0.1)
    payload = oip.encode_request([("x", "FP32", [25_000, 2], bytes(200_000))])
    head = f"POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {payload.size_bytes}\r\n"
    head += f"inference-header-content-length: {len(payload.header)}\r\n\r\n"
    async with serving(ScriptedSubmit(), bounds=bounds) as (_, path):  # noqa: SIM117
        async with calling(path) as stalled, calling(path) as steady:
            for caller in (stalled, steady):
                caller.writer.write(head.encode() + payload.header)
            for _ in range(10):
                steady.writer.write(bytes(19_990))
                stalled.writer.write(b"\0")
                await asyncio.sleep(0.02)
            async with calling(path) as app:
                assert (await app.ask("GET", "/v2"))[0] == 200
                assert (await stalled.receive())[0] == 408
                steady.writer.write(bytes(100))
                status, _, answer = await steady.receive()
                assert (status, b"as JSON; ask for it in binary form" in answer) == (400, True)


async def test_at_the_limit_a_body_that_drips_in_chunks_makes_way_and_one_that_comes_on_stays() -> None:
    bounds = Bounds(connections=2, spare_s=0.05, stall_s=0.1)
    head = b"POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving(ScriptedSubmit(), bounds=bounds) as (_, path):  # noqa: SIM117
        async with calling(path) as dripping, calling(path) as steady:
            for caller in (dripping, steady):
                caller.writer.write(head)
            for _ in range(10):
                steady.writer.write(b"4e20\r\n" + b" " * 20_000 + b"\r\n")
                dripping.writer.write(b"1\r\n \r\n" * 5)
                await asyncio.sleep(0.02)
            async with calling(path) as app:
                assert (await app.ask("GET", "/v2"))[0] == 200
                assert (await dripping.receive())[0] == 408
                steady.writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(DOUBLE_BODY), DOUBLE_BODY))
                status, _, answer = await steady.receive()
                assert status != 408, answer


@pytest.mark.parametrize(
    ("line", "end", "status"),
    [
        (b"%x", b"x: y\r\nZ-1:\r\n", 200),
        (b"%x", b"x: \0\r\n", 400),
        (b"%x", b"x: y\n", 400),
        (b"%x", b"\n", 400),
        (b"%x", b"x y\r\n", 400),
        (b"%x;" + b"e" * 200, b"", 200),
        (b"%x;" + b"e" * 300, b"", 400),
        (b"%x;" + b"e" * 5000, b"", 400),
    ],
    ids=["proper", "NUL", "bare LF", "empty line of LF", "no colon", "extension", "too long", "far too long"],
)
async def test_what_stands_around_chunks_is_bounded_and_checked(line: bytes, end: bytes, status: int) -> None:
    head = b"POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving(ScriptedSubmit()) as (_, path), calling(path) as caller:
        chunk = line % len(DOUBLE_BODY) + b"\r\n" + DOUBLE_BODY + b"\r\n0\r\n" + end + b"\r\n"
        caller.writer.write(head + chunk)
        assert (await caller.receive())[0] == status


async def test_one_empty_line_before_a_request_is_skipped_and_no_more() -> None:
    asked = b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n"
    async with serving(ScriptedSubmit()) as (_, path), calling(path) as caller:
        for _ in range(2):
            for piece in (b"\r", b"\n", asked):
                caller.writer.write(piece)
                await asyncio.sleep(0.005)
            assert (await caller.receive())[0] == 200
        caller.writer.write(b"\r\n\r\n" + asked)
        assert (await caller.receive())[0] == 400


async def test_a_refused_caller_reads_why_though_it_sends_a_lot_first() -> None:
    async with serving(ScriptedSubmit(), bounds=Bounds(connections=1)) as (_, path), calling(path) as one:
        assert (await one.ask("GET", "/v2"))[0] == 200
        async with calling(path) as refused:
            await asyncio.sleep(0.02)
            for _ in range(64):
                await refused.send("POST", "/v2/models/double/infer", bytes(1 << 16))
            assert (await refused.receive())[0] == 503
    async with serving(ScriptedSubmit()) as (_, path), calling(path) as large:
        await large.send("POST", "/v2/models/support-intent/infer", bytes(8 << 20))
        assert (await large.receive())[0] == 400


async def test_what_would_be_refused_is_refused_before_its_tensors_are_read() -> None:
    submit, shown = ScriptedSubmit(), list[InferRequest]()

    def decline(request: InferRequest) -> ScriptedTicket | None:
        shown.append(request)
        full = ScriptedSubmit(lambda _: Refusal(Reason.QUEUE_FULL, "8 wait"))
        return full(request) if request.priority < 0 else None

    async with serving(submit, decline=decline) as (gateway, path), calling(path) as caller:
        for priority, expected in ((-1, 429), (0, 200), (-1, 429)):
            parameters = {"binary_data_output": True, "priority": priority}
            payload = oip.encode_request([("x", "FP32", [1 << 18, 2], bytes(1 << 21))], parameters=parameters)
            length = str(len(payload.header))
            head = f"content-length: {payload.size_bytes}\r\ninference-header-content-length: {length}\r\n\r\n".encode()
            caller.writer.write(b"POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\n" + head + payload.header)
            if priority < 0:
                status, headers, answer = await caller.receive()
                assert (status, headers["retry-after"], json.loads(answer)["reason"]) == (429, "1", "queue_full")
            caller.writer.write(payload.tensors[0])
            if priority == 0:
                assert (await caller.receive())[0] == expected
        assert (await caller.ask("POST", "/v2/models/double/infer", DOUBLE_BODY))[0] == 200
        assert [request.payload.tensors for request in shown] == [(), (), ()]
        assert gateway.snapshot().submitted == 4
    assert len(submit.tickets) == 2, "a small one is not asked about first"


async def test_a_request_whose_deadline_passes_while_it_comes_is_told_at_once() -> None:
    submit = ScriptedSubmit(lambda _: Expired("too late"))
    payload = oip.encode_request([("x", "FP32", [1 << 10, 2], bytes(1 << 13))], parameters={"deadline_ms": 100})
    head = f"content-length: {payload.size_bytes}\r\ninference-header-content-length: {len(payload.header)}\r\n\r\n"
    async with serving(submit) as (_, path), calling(path) as caller:
        caller.writer.write(b"POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\n" + head.encode() + payload.header)
        status, _, answer = await asyncio.wait_for(caller.receive(), 5)
        assert (status, json.loads(answer)["outcome"]) == (504, "expired")
        (ticket,) = submit.tickets
        assert ticket.request.deadlines.total_ns <= LoopClock(asyncio.get_running_loop()).now_ns()
        caller.writer.write(payload.tensors[0])
        submit.script = run_model
        assert (await caller.ask("POST", "/v2/models/double/infer", DOUBLE_BODY))[0] == 200


async def test_a_deadline_counts_from_the_head_not_from_the_end_of_the_body() -> None:
    submit = ScriptedSubmit()
    async with serving(submit) as (_, path), calling(path) as caller:
        head = f"POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(DOUBLE_BODY)}\r\n\r\n"
        before_ns = LoopClock(asyncio.get_running_loop()).now_ns()
        caller.writer.write(head.encode())
        await asyncio.sleep(0.1)
        caller.writer.write(DOUBLE_BODY)
        assert (await caller.receive())[0] == 200
    assert submit.tickets[0].request.timeline.received_ns - before_ns < 90_000_000


async def test_a_flood_of_callers_is_answered_every_one() -> None:
    """More at once than the gateway serves, each with a body: nobody gets a broken pipe instead of an answer."""
    submit = ScriptedSubmit(delay_s=0.2)
    payload = oip.encode_request([("x", "FP32", [50_000, 2], bytes(400_000))], parameters={"binary_data_output": True})
    length = str(len(payload.header))

    async def one(path: Path) -> tuple[int, dict[str, str]]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        sock.connect(str(path))
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        caller = Caller(reader, writer)
        try:
            body = oip.join(payload)
            await caller.send("POST", "/v2/models/double/infer", body, inference_header_content_length=length)
            status, headers, _ = await caller.receive()
        finally:
            writer.close()
        return status, headers

    async with serving(submit, bounds=Bounds(linger_s=5.0)) as (gateway, path):
        answers = await asyncio.wait_for(asyncio.gather(*(one(path) for _ in range(200))), 20)
        served = [status for status, _ in answers].count(200)
        refused = [headers["retry-after"] for status, headers in answers if status in {429, 503}]
        assert served >= 32
        assert served + len(refused) == 200
        assert gateway.snapshot().refused["queue_full"] == len(refused)


async def test_json_that_is_too_large_is_refused_before_it_is_read_or_after_no_long_while() -> None:
    submit = ScriptedSubmit()
    async with serving(submit) as (gateway, path), calling(path) as caller:
        data = {"name": "x", "datatype": "FP32", "shape": [40_000, 2], "data": [1.5] * 80_000}
        body = json.dumps({"inputs": [data]}).encode()
        status, answer = await caller.ask("POST", "/v2/models/double/infer", body)
        assert (status, answer["reason"]) == (400, "input_invalid")
        assert "send tensors as binary data" in answer["detail"]
        head = b"POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        caller.writer.write(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        status, _, answer = await caller.receive()
        assert (status, b"send tensors as binary data" in answer) == (400, True)
    async with serving(submit) as (gateway, path), calling(path) as caller:
        caller.writer.write(b"POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
        status, _, answer = await caller.receive()
        assert (status, b"send tensors as binary data" in answer) == (400, True)
        assert not submit.tickets
        assert gateway.snapshot().refused == {"input_invalid": 1}


async def test_large_json_of_many_callers_is_answered_and_all_that_they_borrow_is_given_back() -> None:
    body = json.dumps(
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [8000, 2], "data": [1.5] * 16_000}]}
    ).encode()
    leases = list[bool]()

    class Lease:
        def release(self) -> None:
            leases.append(True)

    def script(request: InferRequest) -> Ending:
        result = run_model(request)
        assert isinstance(result, Result)
        result.lease = Lease()
        return result

    async def one(path: Path) -> None:
        async with calling(path) as caller:
            for _ in range(3):
                status, answer = await caller.ask("POST", "/v2/models/double/infer", body)
                assert (status, answer["outputs"][0]["data"][-1]) == (200, 3)

    async with serving(ScriptedSubmit(script)) as (_, path):
        await asyncio.gather(*(one(path) for _ in range(8)))
    assert len(leases) == 24


async def test_an_input_that_is_too_large_is_named_though_its_body_is_larger_than_any() -> None:
    submit = ScriptedSubmit()
    async with serving(submit) as (gateway, path), calling(path) as caller:
        payload = oip.encode_request([("image", "UINT8", [1, 2000, 2000, 3], bytes(12_000_000))])
        head = f"content-length: {payload.size_bytes}\r\ninference-header-content-length: {len(payload.header)}\r\n\r\n"
        caller.writer.write(b"POST /v2/models/camera/infer HTTP/1.1\r\nhost: x\r\n" + head.encode() + payload.header)
        status, _, answer = await caller.receive()
        assert (status, json.loads(answer)["reason"]) == (400, "input_invalid")
        assert "'image' takes UINT8 [1, -1, -1, 3] up to [1, 64, 64, 3]" in json.loads(answer)["detail"]
        assert "[1, 2000, 2000, 3] came" in json.loads(answer)["detail"]
        assert gateway.snapshot().refused == {"input_invalid": 1}


async def test_a_caller_that_only_says_it_sends_no_more_is_answered() -> None:
    submit = ScriptedSubmit(delay_s=0.2)
    async with serving(submit) as (gateway, path), calling(path) as caller:
        await caller.send("POST", "/v2/models/double/infer", DOUBLE_BODY)
        caller.writer.write_eof()
        assert (await caller.receive())[0] == 200
        assert await asyncio.wait_for(caller.reader.read(), 5) == b""
        assert gateway.snapshot().abandoned == 0


async def test_a_caller_that_sent_all_it_had_and_then_hangs_up_has_its_request_cancelled() -> None:
    submit = ScriptedSubmit(delay_s=30)
    async with serving(submit) as (gateway, path):
        async with calling(path) as caller:
            await caller.send("POST", "/v2/models/double/infer", DOUBLE_BODY)
            caller.writer.write_eof()
            await _eventually(lambda: submit.tickets)
            await asyncio.sleep(0.1)
            assert not submit.tickets[0].cancelled.is_set()
        await _eventually(lambda: gateway.snapshot().abandoned == 1)


def _large(leases: list[_CountedLease]) -> Callable[[InferRequest], Ending]:
    def large(_: InferRequest) -> Ending:
        leases.append(_CountedLease())
        payload = oip.encode_response([("y", "FP32", [1 << 20, 2], bytes(range(256)) * (8 << 12))])
        return Result(payload, Placement.LOCAL, "d", "1.0.0", "fp32", lease=leases[-1])

    return large


async def test_a_slow_reader_gets_its_answer_whole_but_not_the_models_memory() -> None:
    leases: list[_CountedLease] = []
    body = DOUBLE_BODY[:-1] + b', "parameters": {"binary_data_output": true}}'
    bounds = Bounds(grace_s=0.05, copied_bytes=10 << 20)
    async with serving(ScriptedSubmit(_large(leases)), bounds=bounds) as (_, path):
        async with calling(path) as slow, calling(path) as beyond:
            await slow.send("POST", "/v2/models/double/infer", body)
            await _eventually(lambda: leases and leases[0].released)
            await beyond.send("POST", "/v2/models/double/infer", body)
            await _eventually(lambda: len(leases) == 2 and leases[1].released)
            status, headers, answer = await slow.receive()
            assert status == 200
            assert answer[int(headers["inference-header-content-length"]) :] == bytes(range(256)) * (8 << 12)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):  # no room for another copy
                await beyond.receive()
        async with calling(path) as again:  # the first copy's room is free again
            await again.send("POST", "/v2/models/double/infer", body)
            await _eventually(lambda: len(leases) == 3 and leases[2].released)
            assert (await again.receive())[0] == 200
    assert [lease.released for lease in leases] == [1, 1, 1]


async def _longest_pause_s(during: asyncio.Task[Any]) -> float:
    loop, longest = asyncio.get_running_loop(), 0.0
    while not during.done():
        before = loop.time()
        await asyncio.sleep(0)
        longest = max(longest, loop.time() - before)
    return longest


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 60_000,
         b"HTTP/1.1 413"),
        (b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n" * 2000, b"HTTP/1.1 200"),
    ],
    ids=["chunks", "requests"],
)  # fmt: skip
async def test_no_caller_keeps_the_loop_for_itself(sent: bytes, answer: bytes) -> None:
    async with serving(ScriptedSubmit()) as (_, path), calling(path) as caller:

        async def attack() -> bytes:
            caller.writer.write(sent)
            caller.writer.write_eof()
            return bytes(await caller.reader.read())

        task = asyncio.create_task(attack())
        assert await _longest_pause_s(task) < 0.1
        assert task.result().startswith(answer)


async def test_a_body_in_pieces_is_held_once_and_in_few_of_them() -> None:
    head = b"POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in DOUBLE_BODY)
    async with serving(ScriptedSubmit(), bounds=Bounds(chunks=len(DOUBLE_BODY))) as (_, path):  # noqa: SIM117
        async with calling(path) as caller:
            caller.writer.write(head + pieces + b"0\r\n\r\n")
            assert (await caller.receive())[0] == 200
            caller.writer.write(head + b"1\r\n \r\n" + pieces + b"0\r\n\r\n")
            status, _, answer = await caller.receive()
            assert (status, b"chunks; send larger ones" in answer) == (413, True)


def test_what_the_gateway_may_hold_is_known_beforehand() -> None:
    small = Bounds(connections=4, body_bytes_in_flight=1 << 20, copied_bytes=1 << 20)
    assert small.body_bytes_in_flight + small.copied_bytes < small.buffer_bytes < Bounds().buffer_bytes


@pytest.mark.parametrize(
    "sent", [b"", b"GET /v2 HT", b"POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx"]
)
async def test_a_caller_that_stays_silent_is_let_go(sent: bytes) -> None:
    bounds = Bounds(idle_s=0.1, head_s=0.1, body_s=0.1)
    async with serving(ScriptedSubmit(), bounds=bounds) as (gateway, path), calling(path) as caller:
        caller.writer.write(sent)
        await asyncio.wait_for(caller.reader.read(), 5)
        await _eventually(lambda: gateway.snapshot().connections == 0)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01 not http\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
        b"POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_no_http_is_told_so_and_closed(sent: bytes) -> None:
    async with serving(ScriptedSubmit()) as (gateway, path), calling(path) as caller:
        caller.writer.write(sent)
        answer = await asyncio.wait_for(caller.reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 4")
        await _eventually(lambda: gateway.snapshot().connections == 0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.sampled_from(
            [
                b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n",
                b"HEAD /v2 HTTP/1.1\r\nhost: x\r\n\r\n",
                b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
                b"upgrade: websocket\r\nconnection: upgrade\r\n",
                b"POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
                % (len(DOUBLE_BODY), DOUBLE_BODY),
                b"POST /v2/models/double/infer HTTP/1.1\r\n",
                b"host: x\r\n",
                b"content-length: 5\r\n\r\n",
                b"transfer-encoding: chunked\r\n\r\n",
                b"5\r\nhello\r\n",
                b"0\r\n\r\n",
                b"expect: 100-continue\r\n",
                b"connection: close\r\n",
                b"%2e%2e/%ff",
                b"\r\n",
            ]
        )
        | st.binary(max_size=20),
        max_size=8,
    )
)
def test_no_bytes_of_a_caller_end_the_gateway(pieces: list[bytes]) -> None:
    async def main() -> None:
        async with serving(ScriptedSubmit(), bounds=Bounds(idle_s=0.02, head_s=0.02, body_s=0.02)) as (gateway, path):
            async with calling(path) as rude:
                for piece in pieces:
                    rude.writer.write(piece)
                with contextlib.suppress(ConnectionError):
                    await asyncio.wait_for(rude.reader.read(), 5)
            async with calling(path) as polite:
                assert (await polite.ask("GET", "/v2/health/live"))[0] == 200
            assert gateway.snapshot().faults == 0

    asyncio.run(main())


@pytest.mark.parametrize("target", ["/v2", "/v2/models/double", "/nothing", "/v2/models/double/infer"])
async def test_head_is_answered_with_a_head(target: str) -> None:
    async with serving(ScriptedSubmit()) as (gateway, path), calling(path) as caller:
        await caller.send("HEAD", target, connection="close")
        answer = await asyncio.wait_for(caller.reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 ")
        assert answer.endswith(b"\r\n\r\n"), "a HEAD has no body"
        assert b"content-length: " in answer
        await _eventually(lambda: gateway.snapshot().connections == 0)
        assert gateway.snapshot().faults == 0


async def test_a_fault_of_ours_ends_one_connection_is_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: InferRequest) -> Ending:
        raise ZeroDivisionError

    async with serving(ScriptedSubmit(broken)) as (gateway, path):
        for _ in range(3):
            async with calling(path) as caller:
                status, answer = await caller.ask("POST", "/v2/models/double/infer", DOUBLE_BODY)
                assert status == 500
                assert "ZeroDivisionError" in answer["error"]
                assert await caller.reader.read() == b""
        async with calling(path) as caller:
            assert (await caller.ask("GET", "/v2"))[0] == 200
        assert gateway.snapshot().faults == 3
        await asyncio.wait_for(gateway.settled(), 5)
    assert [record.levelname for record in caplog.records if "fault of ours" in record.message] == ["ERROR"]


async def test_only_owner_and_group_may_ask(tmp_path: Path) -> None:
    async with serving(ScriptedSubmit()) as (_, path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660


def _gateway(path: Path) -> Gateway:
    return Gateway(
        socket_path=path, submit=ScriptedSubmit(run_model), models=tuple, status=dict,
        clock=LoopClock(asyncio.get_running_loop()),
    )  # fmt: skip


async def test_takes_over_the_socket_of_a_service_that_is_gone_but_not_of_one_that_lives() -> None:
    async with serving(ScriptedSubmit()) as (_, path):
        with pytest.raises(LinkError, match="another service listens"):
            await _gateway(path).run()
        async with calling(path) as caller:
            assert (await caller.ask("GET", "/v2"))[0] == 200
        stale = path.with_name("stale")
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(stale))
        task = asyncio.create_task(_gateway(stale).run())
        await _eventually(lambda: _connects(stale))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as trial, contextlib.suppress(OSError):
        trial.connect(str(path))
        return True
    return False


async def test_says_why_a_socket_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, text in (
        (tmp_path / "file", "is no socket"),
        (tmp_path / "file/s", "cannot listen"),
        (tmp_path / ("s" * 120), "more than 107 bytes"),
    ):
        with pytest.raises(LinkError, match=text):
            await _gateway(path).run()
    assert (tmp_path / "file").read_text() == "x"


async def test_stopping_ends_open_connections_and_cancels_what_they_wait_for() -> None:
    submit = ScriptedSubmit(delay_s=30)
    async with asyncio.timeout(5), serving(submit) as (_, path):
        reader, writer = await asyncio.open_unix_connection(path)
        await Caller(reader, writer).send("POST", "/v2/models/double/infer", DOUBLE_BODY)
        await _eventually(lambda: submit.tickets)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    assert submit.tickets[0].cancelled.is_set()
    writer.close()
