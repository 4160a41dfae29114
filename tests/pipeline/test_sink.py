from __future__ import annotations

import asyncio
import errno
import functools
import json
import math
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from edgeinfer import oip
from edgeinfer.config import JsonLinesSink, MqttSink
from edgeinfer.pipeline.record import Delivery, encode_record
from edgeinfer.pipeline.sink import MAX_WAITING_LINES, JsonLines, MqttResults
from edgeinfer.quantity import Bytes
from edgeinfer.request import (
    Deadlines,
    Ending,
    InferRequest,
    Placement,
    Reason,
    Refusal,
    Result,
    Timeline,
    conclude,
)
from tests.pipeline.staging import MS, Inline, answer, loop_clock
from tests.virtual_time import run_virtual


def _delivery(number: int = 0, ending: Ending = None, timeline: Timeline | None = None) -> Delivery:
    timeline = timeline or Timeline(received_ns=0)
    payload = oip.encode_media("image", b"x", "image/jpeg")
    request = InferRequest("camera", payload, Deadlines(10**12), timeline, stream="front")
    outcome = conclude(request, ending or answer(), now_ns=50 * MS)
    return Delivery("front", f"#{number}", outcome, lambda: {"at": "2026-01-01T00:00:00Z", "mono_ns": 5})


def _record(delivery: Delivery, outputs: list[str] | None = None) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(encode_record(delivery, outputs))
    return record


def test_a_record_says_all_there_is_to_know() -> None:
    timeline = Timeline(
        received_ns=2 * MS, captured_ns=MS, dispatched_ns=11 * MS, decoded_ns=14 * MS, started_ns=15 * MS,
        finished_ns=40 * MS, postprocessed_ns=42 * MS,
    )  # fmt: skip
    assert _record(_delivery(7, timeline=timeline)) == {
        "loop": "front", "frame": "#7", "outcome": "ok", "reason": "", "detail": "", "model": "camera",
        "placement": "local", "where": "dev-1", "version": "1.0.0", "variant": "fp32", "digest": "d" * 64,
        "label": "cat", "score": 0.9, "at": "2026-01-01T00:00:00Z", "mono_ns": 5, "omitted": [],
        "outputs": {"boxes": {"datatype": "UINT8", "shape": [4], "data": [0, 0, 0, 0]}},
        "latency_ms": {"wait": 10.0, "decode": 3.0, "run": 25.0, "post": 2.0, "total": 49.0},
    }  # fmt: skip


def test_a_refusal_is_a_record_too() -> None:
    record = _record(_delivery(ending=Refusal(Reason.THERMAL, "81 C")))
    assert (record["outcome"], record["reason"], record["detail"]) == ("rejected", "thermal", "81 C")
    assert "outputs" not in record
    assert record["latency_ms"] == {"total": 50.0}


def test_large_outputs_are_left_out_and_named_unless_they_are_asked_for() -> None:
    delivery = _delivery(ending=answer(outputs={"small": 4096, "mask": 4097, "huge": (1 << 20) + 1}))
    record = _record(delivery)
    assert (list(record["outputs"]), record["omitted"]) == (["small"], ["mask", "huge"])
    record = _record(delivery, ["mask", "huge"])
    assert (list(record["outputs"]), record["omitted"]) == (["mask"], ["huge"])


def test_nan_and_infinity_become_null() -> None:
    raw = struct.pack("<3f", 1.0, math.nan, -math.inf)
    payload = oip.encode_response([("y", "FP32", [3], raw)], parameters={"label": "x", "score": 1.0})
    record = _record(_delivery(ending=Result(payload, Placement.LOCAL, "d", "1", "v")))
    assert record["outputs"]["y"]["data"] == [1.0, None, None]


def test_mqtt_publishes_each_record_to_its_topic() -> None:
    sent: list[tuple[str, bytes]] = []
    sink = MqttResults(MqttSink(), topic="t/result/front", send=lambda topic, data: sent.append((topic, data)))
    sink.deliver(_delivery(1))
    sink.deliver(_delivery(2))
    assert [(topic, json.loads(data)["frame"]) for topic, data in sent] == [
        ("t/result/front", "#1"),
        ("t/result/front", "#2"),
    ]
    assert sink.snapshot().delivered == 2


def _frames(path: Path) -> list[str]:
    return [json.loads(line)["frame"] for line in path.read_text().splitlines() if line]


def _write(section: JsonLinesSink, act: Callable[[JsonLines], Any]) -> JsonLines:
    async def main() -> JsonLines:
        sink = JsonLines(section, clock=loop_clock(), storage=Inline())
        task = asyncio.create_task(sink.run())
        await asyncio.sleep(0)
        await act(sink)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return sink

    return run_virtual(main())


async def _deliver(sink: JsonLines, numbers: range, pause_s: float = 0.01) -> None:
    for number in numbers:
        sink.deliver(_delivery(number))
        await asyncio.sleep(pause_s)


def test_lines_are_appended_in_order_also_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "deep/down/results.jsonl"
    for start in (0, 5):
        sink = _write(JsonLinesSink(path), functools.partial(_deliver, numbers=range(start, start + 5)))
        assert (sink.snapshot().delivered, sink.snapshot().dropped, sink.snapshot().problem) == (5, 0, "")
    assert _frames(path) == [f"#{number}" for number in range(10)]


def test_what_waits_is_written_when_it_is_stopped(tmp_path: Path) -> None:
    async def act(sink: JsonLines) -> None:
        for number in range(20):
            sink.deliver(_delivery(number))

    _write(JsonLinesSink(tmp_path / "r.jsonl"), act)
    assert len(_frames(tmp_path / "r.jsonl")) == 20


def test_rotation_keeps_the_newest_in_at_most_twice_the_size(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    _write(JsonLinesSink(path, max_bytes=Bytes(5000)), lambda sink: _deliver(sink, range(100)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.jsonl", "r.jsonl.1"]
    assert max(path.stat().st_size for path in tmp_path.iterdir()) <= 5000
    frames = _frames(tmp_path / "r.jsonl.1") + _frames(path)
    assert frames == [f"#{number}" for number in range(100 - len(frames), 100)]
    assert len(frames) > 10


def test_half_a_line_left_by_a_power_cut_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"frame": "#0"}\n{"fra')
    _write(JsonLinesSink(path), lambda sink: _deliver(sink, range(1, 2)))
    lines = path.read_text().splitlines()
    assert json.loads(lines[0])["frame"] == "#0"
    assert json.loads(lines[2])["frame"] == "#1"


def test_a_full_disk_costs_the_oldest_lines_and_is_told_and_got_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.jsonl"
    real = os.write
    full = True

    def write(descriptor: int, data: bytes) -> int:
        if full and data.startswith(b"{"):
            real(descriptor, data[:7])
            return 7
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)

    async def act(sink: JsonLines) -> None:
        nonlocal full
        await _deliver(sink, range(300), pause_s=0.1)
        assert "no space left" in sink.snapshot().problem
        assert sink.snapshot().dropped == 300 - MAX_WAITING_LINES
        assert path.read_bytes() == b"", "half a line was left"
        full = False
        await asyncio.sleep(6)
        assert sink.snapshot().problem == ""

    _write(JsonLinesSink(path), act)
    assert _frames(path) == [f"#{number}" for number in range(300 - MAX_WAITING_LINES, 300)]


def test_a_place_that_cannot_be_written_is_tried_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def refuse(*arguments: Any, **_: Any) -> int:
        tries.append(arguments)
        raise OSError(errno.EROFS, "Read-only file system")

    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *rest, **more: refuse(path) if "r.jsonl" in str(path) else real(path, *rest, **more)
    )
    sink = _write(JsonLinesSink(tmp_path / "r.jsonl"), lambda sink: _deliver(sink, range(600), pause_s=0.1))
    assert len(tries) == pytest.approx(60 / 5, abs=2)
    assert "Read-only file system" in sink.snapshot().problem
    assert sink.snapshot().dropped == 600


async def test_a_disk_that_hangs_never_makes_the_loop_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = Event()
    real = os.write
    monkeypatch.setattr("edgeinfer.pipeline.sink._FLUSH_S", 0.05)
    monkeypatch.setattr(os, "write", lambda descriptor, data: hang.wait(10) and real(descriptor, data))
    with ThreadPoolExecutor(1, "storage") as storage:
        sink = JsonLines(JsonLinesSink(tmp_path / "r.jsonl"), clock=loop_clock(), storage=storage)
        task = asyncio.create_task(sink.run())
        async with asyncio.timeout(2):
            for number in range(2000):
                sink.deliver(_delivery(number))
                if number % 100 == 0:
                    await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert sink.snapshot().dropped >= 2000 - 2 * MAX_WAITING_LINES
        hang.set()
