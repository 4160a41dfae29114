from __future__ import annotations

import array
import asyncio
import os
import struct
import wave
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from edgeinfer import oip
from edgeinfer.config import WavSource
from edgeinfer.pipeline.frame import Frame, SourceError
from edgeinfer.pipeline.wav import WavFrames
from tests.pipeline.staging import MS, Inline, loop_clock
from tests.virtual_time import run_virtual


def _write(path: Path, samples: list[int], *, rate: int = 16000, channels: int = 1, width: int = 2) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        packed = {
            1: lambda: bytes((sample >> 8) + 128 for sample in samples),
            2: lambda: struct.pack(f"<{len(samples)}h", *samples),
            3: lambda: b"".join(struct.pack("<i", sample << 16)[1:] for sample in samples),
            4: lambda: struct.pack(f"<{len(samples)}i", *[sample << 16 for sample in samples]),
        }[width]()
        file.writeframes(packed)


def _run(section: WavSource, act: Callable[[WavFrames], Awaitable[None]]) -> None:
    async def main() -> None:
        await act(WavFrames(section, clock=loop_clock(), storage=Inline()))

    run_virtual(main())


async def _next(source: WavFrames) -> Frame:
    frame = await source.next_frame()
    assert frame is not None
    return frame


def _samples(frame: Frame) -> list[float]:
    return array.array("f", frame.data).tolist()


def test_delivers_chunks_like_a_microphone_would(tmp_path: Path) -> None:
    _write(tmp_path / "a.wav", list(range(0, 1024, 2)) * 2)
    _write(tmp_path / "b.wav", [7] * 100)

    async def act(source: WavFrames) -> None:
        started_ns = loop_clock().now_ns()
        for number, (name, start) in enumerate(
            [("a.wav@0", True), ("a.wav@512", False), ("b.wav@0", True), ("a.wav@0", True)], 1
        ):
            frame = await _next(source)
            assert (frame.name, frame.sequence_start) == (name, start)
            assert frame.captured_ns == started_ns + number * 32 * MS
            assert loop_clock().now_ns() >= frame.captured_ns
            assert len(_samples(frame)) == 512

    _run(WavSource(tmp_path, 512), act)


def test_a_chunk_is_the_tensor_that_the_model_takes(tmp_path: Path) -> None:
    _write(tmp_path / "a.wav", [16384, -32768, 0, 32767])

    async def act(source: WavFrames) -> None:
        payload = (await _next(source)).payload("audio")
        header = oip.request_header(payload)
        assert (header.inputs[0].name, header.inputs[0].datatype, header.inputs[0].shape) == ("audio", "FP32", [1, 4])
        assert oip.elements(header.inputs[0], payload.tensors[0]) == [0.5, -1.0, 0.0, 32767 / 32768]

    _run(WavSource(tmp_path / "a.wav", 4), act)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_gives_the_same_samples_as_the_workers_decoder(tmp_path: Path, width: int, channels: int) -> None:
    from edgeinfer.artifact.manifest import Decode, TensorSpec
    from edgeinfer.worker.decode import decode

    samples = [((index * 7919) % 65536 - 32768) & ~0xFF for index in range(64 * channels)]
    _write(tmp_path / "a.wav", samples, channels=channels, width=width)
    spec = TensorSpec("audio", "FP32", [1, 64], decode=Decode("audio", sample_rate_hz=16000))
    expected = decode(spec, "audio/wav", memoryview((tmp_path / "a.wav").read_bytes()))

    async def act(source: WavFrames) -> None:
        got = np.frombuffer((await _next(source)).data, np.float32)
        assert np.array_equal(got, expected[0])

    _run(WavSource(tmp_path / "a.wav", 64), act)


def test_what_a_slow_loop_misses_is_counted_and_starts_a_sequence_again(tmp_path: Path) -> None:
    _write(tmp_path / "a.wav", [1] * 512 * 100)

    async def act(source: WavFrames) -> None:
        await _next(source)
        assert (await _next(source)).sequence_start is False
        await asyncio.sleep(0.032 * 3.5)  # two and a half chunks too late
        frame = await _next(source)
        assert (frame.name, frame.sequence_start) == (f"a.wav@{512 * 4}", True)
        assert loop_clock().now_ns() - frame.captured_ns < 32 * MS
        assert source.snapshot().skipped == 2
        assert (await _next(source)).sequence_start is False

    _run(WavSource(tmp_path, 512), act)


def test_a_loop_that_was_away_for_long_does_not_read_through_all_of_it(tmp_path: Path) -> None:
    _write(tmp_path / "a.wav", [1] * 512 * 100)

    async def act(source: WavFrames) -> None:
        await _next(source)
        await asyncio.sleep(36_000)
        frame = await _next(source)
        assert (frame.name, frame.sequence_start) == ("a.wav@512", True)
        assert loop_clock().now_ns() - frame.captured_ns < 32 * MS
        assert source.snapshot().skipped == pytest.approx(36_000 / 0.032, abs=2)

    _run(WavSource(tmp_path, 512), act)


def _bad_files(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    _write(tmp_path / "rate.wav", [1] * 10, rate=44100)
    _write(tmp_path / "empty.wav", [])
    (tmp_path / "text.wav").write_text("no recording")
    (tmp_path / "zero.wav").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    return {
        "another rate": (tmp_path / "rate.wav", "44100 Hz, the loop's source says 16000 Hz: resample the file"),
        "no samples": (tmp_path / "empty.wav", "has no samples"),
        "text": (tmp_path / "text.wav", "is not a PCM WAV file"),
        "no bytes": (tmp_path / "zero.wav", "is not a PCM WAV file"),
        "missing": (tmp_path / "missing.wav", "No such file"),
        "a folder without any": (tmp_path / "folder", "has no .wav file"),
    }


def test_says_what_is_wrong_with_a_recording(tmp_path: Path) -> None:
    for path, text in _bad_files(tmp_path).values():

        async def act(source: WavFrames, path: Path = path, text: str = text) -> None:
            for _ in range(2):
                with pytest.raises(SourceError) as caught:
                    await source.next_frame()
                assert str(path) in str(caught.value)
                assert text in str(caught.value)
            assert text in source.snapshot().problem

        _run(WavSource(path, 512), act)


def test_a_recording_that_comes_later_is_played(tmp_path: Path) -> None:
    async def act(source: WavFrames) -> None:
        with pytest.raises(SourceError):
            await source.next_frame()
        _write(tmp_path / "a.wav", [1] * 512)
        assert (await _next(source)).sequence_start
        assert source.snapshot().problem == ""

    _run(WavSource(tmp_path, 512), act)


@pytest.mark.parametrize("kind", ["fifo", "fifo in a folder", "device"])
def test_what_would_wait_for_somebody_is_told_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.wav"
    if kind == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)

    async def act(source: WavFrames) -> None:
        with pytest.raises(SourceError, match="is not a regular file"):
            await source.next_frame()

    _run(WavSource(tmp_path if kind == "fifo in a folder" else path, chunk_samples=512), act)
