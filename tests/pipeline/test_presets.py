"""Cameras and microphones: what is run for them, and real streams through the real programs."""

from __future__ import annotations

import array
import asyncio
import contextlib
import dataclasses
import io
import itertools
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edgeinfer.clock import NS_PER_MS, MonotonicClock
from edgeinfer.config import CameraSource, CommandSource, MicrophoneSource, RtspSource, SourceSection
from edgeinfer.pipeline import child as kept
from edgeinfer.pipeline import microphone, presets, sources
from edgeinfer.pipeline.child import Launch
from edgeinfer.pipeline.command import CommandFrames
from edgeinfer.pipeline.frame import Frame, Source, SourceError
from edgeinfer.pipeline.framing import FixedFramer, JpegFramer
from edgeinfer.pipeline.microphone import MicrophoneFrames
from edgeinfer.pipeline.sources import open_source
from edgeinfer.pipeline.v4l2 import pixel_formats
from tests.pipeline.cameras import QUIET, HttpCamera, RtspCamera, free_port, needs_arecord, needs_ffmpeg, sending

PASSWORD = "p@ss word'/1"  # every character that a URL or a list would take for its own


@contextlib.asynccontextmanager
async def running(source: Source) -> AsyncIterator[Source]:
    task = asyncio.create_task(source.run())
    try:
        yield source
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def opened(section: SourceSection) -> AsyncIterator[Source]:
    with ThreadPoolExecutor(1) as storage:
        async with running(open_source(section, name="cam", clock=MonotonicClock(), storage=storage)) as source:
            yield source


async def next_of(source: Source, seconds: float = 20) -> Frame:
    frame = await asyncio.wait_for(source.next_frame(), seconds)
    assert frame is not None
    return frame


async def eventually(condition: Callable[[], object], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def picture(frame: Frame) -> tuple[int, int]:
    """Return the size of a frame, having decoded all of it."""
    assert frame.content_type == "image/jpeg"
    with Image.open(io.BytesIO(frame.data), formats=["JPEG"]) as image:
        image.load()
        return image.size


def command_lines() -> list[bytes]:
    """Return the arguments of every process of ours, as everybody on the machine sees them."""
    own = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in own]


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "FIRST_WAIT_NS", 50 * NS_PER_MS)
    monkeypatch.setattr(kept, "LONGEST_WAIT_NS", 200 * NS_PER_MS)


# What is run


@pytest.mark.parametrize(
    ("section", "formats", "codec", "asked"),
    [
        (CameraSource(), {"YUYV", "MJPG"}, "copy", "mjpeg"),
        (CameraSource(), {"YUYV"}, "mjpeg", None),
        (CameraSource(format="yuyv422"), {"YUYV", "MJPG"}, "mjpeg", "yuyv422"),
        (CameraSource(format="mjpeg"), {"YUYV", "MJPG"}, "copy", "mjpeg"),
    ],
)
def test_a_cameras_own_jpegs_are_passed_on(
    section: CameraSource, formats: set[str], codec: str, asked: str | None
) -> None:
    argv = presets.camera(section, formats).argv
    assert argv[argv.index("-c:v") + 1] == codec
    assert (argv[argv.index("-input_format") + 1] if "-input_format" in argv else None) == asked


def test_size_and_rate_are_asked_of_the_camera() -> None:
    argv = presets.camera(CameraSource(width=640, height=480, fps=5), {"MJPG"}).argv
    before = argv[: argv.index("-i")]
    assert before[before.index("-video_size") + 1] == "640x480"
    assert before[before.index("-framerate") + 1] == "5"


@pytest.mark.parametrize("major", [4, 5])
def test_credentials_are_in_no_argument(major: int) -> None:
    section = RtspSource("rtsp://cam/live", credentials_file=Path("/c"))
    launch = presets.network_camera(section, f"joe:{PASSWORD}", major)
    assert not any("joe" in part or "ss" in part for part in launch.argv)
    assert b"joe:p%40ss%20word%27%2F1@cam/live'" in launch.stdin
    assert (b"option rtsp_transport tcp" in launch.stdin) is (major >= 5)
    with pytest.raises(SourceError, match="/c does not hold user:password"):
        presets.network_camera(section, "joe", major)


def test_a_stream_opens_nothing_but_its_own_protocols() -> None:
    for scheme in ("rtsp", "rtsps", "http", "https", "tcp", "udp"):
        for credentials in ("", "a:b"):
            argv = presets.network_camera(RtspSource(f"{scheme}://cam/1"), credentials, 5).argv
            allowed = argv[argv.index("-protocol_whitelist") + 1].split(",")
            assert scheme in allowed
            assert not {"file", "data", "concat", "subfile"} & set(allowed)


def test_a_microphone_is_read_by_what_there_is() -> None:
    section = MicrophoneSource(512, device="hw:1")
    assert presets.microphone(section, ["arecord", "ffmpeg"]).argv[0] == "arecord"
    assert presets.microphone(section, ["ffmpeg"]).argv[0] == "ffmpeg"
    with pytest.raises(SourceError, match="apt-get install alsa-utils"):
        presets.microphone(section, [])


@pytest.mark.parametrize(
    ("device", "text"),
    [("/dev/video99", "there is no camera /dev/video99 .*plugged in"), ("/dev/null", "/dev/null is not a V4L2 camera")],
)
def test_what_is_no_camera_is_told(device: str, text: str) -> None:
    with pytest.raises(SourceError, match=text):
        pixel_formats(Path(device))


@pytest.mark.slow
async def test_a_missing_program_is_told_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    async with opened(RtspSource("rtsp://127.0.0.1/live")) as source:
        await eventually(lambda: source.snapshot().problem)
        assert source.snapshot().problem.endswith("No such file or directory; install it: apt-get install ffmpeg")
    async with opened(MicrophoneSource(512)) as source:
        await eventually(lambda: "neither arecord nor ffmpeg" in source.snapshot().problem)


async def test_a_missing_file_of_credentials_is_told(tmp_path: Path) -> None:
    async with opened(RtspSource("rtsp://127.0.0.1/live", credentials_file=tmp_path / "none")) as source:
        await eventually(lambda: "none cannot be read: No such file" in source.snapshot().problem)


# Network cameras


@needs_ffmpeg
@pytest.mark.system
@pytest.mark.slow
async def test_a_password_works_and_is_seen_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / "secret").write_text(f"joe:{PASSWORD}\n")
    seen: list[bytes] = []
    async with (
        RtspCamera(f"joe:{PASSWORD}") as camera,
        sending("-c:v", "mpeg2video", "-g", "5", "-f", "rtp", camera.rtp),
        opened(RtspSource(camera.url, credentials_file=tmp_path / "secret")) as source,
    ):
        assert picture(await next_of(source)) == (160, 120)
        seen += command_lines()
        camera.close()
        await eventually(lambda: source.snapshot().restarts >= 2)  # hung up, then refused
        problem = source.snapshot().problem
        assert "Connection refused" in problem
        seen.append(problem.encode())
        await camera.open()
        await eventually(lambda: not source.snapshot().problem)
        frame = await next_of(source)
        while not frame.sequence_start:
            frame = await next_of(source)
        assert all("TCP" in transport for transport in camera.transports)
    assert any(b"-protocol_whitelist" in line for line in seen), "the child was looked at"
    seen += [record.getMessage().encode() for record in caplog.records]
    for secret in (PASSWORD.encode(), b"p%40ss", b"joe:"):
        assert not [line for line in seen if secret in line]


@needs_ffmpeg
@pytest.mark.system
@pytest.mark.slow
async def test_a_wrong_password_is_told(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("joe:wrong")
    async with (
        RtspCamera("joe:right") as camera,
        opened(RtspSource(camera.url, credentials_file=tmp_path / "secret")) as source,
    ):
        await eventually(lambda: source.snapshot().problem)
        assert "401 Unauthorized" in source.snapshot().problem
        assert "wrong" not in source.snapshot().problem


@needs_ffmpeg
@pytest.mark.system
@pytest.mark.slow
async def test_a_stream_over_http_comes_back_with_its_camera() -> None:
    camera = HttpCamera()
    async with opened(RtspSource(camera.url, width=80)) as source:
        await eventually(lambda: "Connection refused" in source.snapshot().problem)
        async with camera:
            first = await next_of(source)
            assert first.sequence_start
            assert picture(first) == (80, 60)
        await eventually(lambda: "Connection refused" in source.snapshot().problem)
        async with camera:
            await eventually(lambda: not source.snapshot().problem)
            assert (await next_of(source)).captured_ns > first.captured_ns


@needs_ffmpeg
@pytest.mark.system
@pytest.mark.slow
async def test_every_image_comes_once_and_silence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "SILENCE_NS", 3_000 * NS_PER_MS)
    url = f"udp://127.0.0.1:{free_port()}"
    async with opened(RtspSource(url)) as source:
        async with sending("-c:v", "mpeg2video", "-g", "5", "-f", "mpegts", url):
            images = [(await next_of(source)).data]
            began_ns = time.monotonic_ns()
            while time.monotonic_ns() - began_ns < 2_000 * NS_PER_MS:
                images.append((await next_of(source)).data)
        assert len(set(images)) == len(images), "an image was repeated"
        assert 15 <= len(images) <= 45, "ten a second, and at first what was waiting"
        await eventually(lambda: source.snapshot().problem)
        assert "ffmpeg has given nothing for 3 s" in source.snapshot().problem


@needs_ffmpeg
@pytest.mark.system
@pytest.mark.slow
def test_at_most_so_many_images_a_second_are_passed_on() -> None:
    launch = presets.network_camera(RtspSource("udp://cam", fps=2), "", 5)
    at = launch.argv.index("-protocol_whitelist")
    argv = [*launch.argv[:at], "-f", "lavfi", "-i", "testsrc=rate=10:duration=4", *launch.argv[at + 4 :]]
    done = subprocess.run(argv, capture_output=True, check=True)
    assert len(JpegFramer(1 << 20).feed(done.stdout)) == 8


@needs_ffmpeg
@pytest.mark.system
@pytest.mark.slow
def test_passed_on_jpegs_are_the_cameras_byte_by_byte(tmp_path: Path) -> None:
    film = tmp_path / "film.mjpeg"
    subprocess.run([*QUIET, "-f", "lavfi", "-i", "testsrc=duration=1", "-f", "mjpeg", film], check=True)
    argv = list(presets.camera(CameraSource(film), {"MJPG"}).argv)
    argv[argv.index("v4l2")] = "mjpeg"
    at = argv.index("-input_format")
    done = subprocess.run(argv[:at] + argv[at + 2 :], capture_output=True, check=True)
    passed, shown = JpegFramer(1 << 20).feed(done.stdout), JpegFramer(1 << 20).feed(film.read_bytes())
    assert len(passed) > 10, "nobuffer: what was looked at to know the stream is not shown"
    assert passed == shown[-len(passed) :]


# Children


async def test_a_secret_is_cut_out_also_where_reads_cut_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    code = "import sys,time\nfor c in 'x hunter2 y\\n': sys.stderr.write(c); sys.stderr.flush(); time.sleep(0.002)"

    async def prepare() -> Launch:
        return Launch((sys.executable, "-c", code), secrets=("hunter2",))

    section = CommandSource(["x"], framing="lines")
    source = CommandFrames(section, name="cam", clock=MonotonicClock(), prepare=prepare)
    async with running(source):
        await eventually(lambda: source.snapshot().problem)
        assert source.snapshot().problem.endswith("exited with code 0: x *** y")
    assert "hunter2" not in caplog.text


async def test_output_that_is_worth_nothing_is_not_used() -> None:
    async def prepare() -> Launch:
        script = "echo 'Warning: rate is not accurate (requested = 16000Hz, got = 48000Hz)' >&2; exec sleep 60"
        return Launch(("sh", "-c", script), fatal=presets.microphone(MicrophoneSource(1), ["arecord"]).fatal)

    source = CommandFrames(CommandSource(["sh"], framing="lines"), name="mic", clock=MonotonicClock(), prepare=prepare)
    async with running(source):
        await eventually(lambda: source.snapshot().problem)
        assert "got = 48000Hz" in source.snapshot().problem
        assert "plughw:" in source.snapshot().problem


async def test_a_child_is_given_its_input_and_reads_its_end() -> None:
    async def prepare() -> Launch:
        return Launch(("cat",), stdin=b"one\ntwo\n")

    section = CommandSource(["cat"], framing="lines")
    source = CommandFrames(section, name="c", clock=MonotonicClock(), prepare=prepare)
    async with running(source):
        assert (await next_of(source)).data in {b"one", b"two"}
        await eventually(lambda: source.snapshot().restarts)


# Microphones


class StoppedClock:
    def __init__(self, now_ns: int) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        return self._now_ns


async def nothing() -> Launch:
    raise SourceError("not started")


def ramp(start: int, count: int) -> bytes:
    return array.array("h", [value % 32768 for value in range(start, start + count)]).tobytes()


def first_sample(frame: Frame) -> int:
    samples = array.array("f", frame.data)
    assert len(samples) == frame.shape[1]
    steps = [round(value * 32768) for value in samples]
    assert all((after - before) % 32768 == 1 for before, after in itertools.pairwise(steps)), "no gap inside"
    return steps[0]


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(1, 700), st.randoms(use_true_random=False))
def test_chunks_are_exact_and_every_gap_is_told(reads: list[int], size: int, dice: random.Random) -> None:
    async def check() -> None:
        second_ns = 1_000_000_000
        source = MicrophoneFrames(MicrophoneSource(size), name="mic", clock=StoppedClock(second_ns), prepare=nothing)
        framer, sent, expected, frames = FixedFramer(2 * size), 0, 0, 0
        for read in reads:
            if chunks := framer.feed(ramp(sent, read)):
                source._take(chunks, framer, frames == 0)
                frames += len(chunks)
            sent += read
            while source._waiting and dice.random() < 0.7:
                frame = await source.next_frame()
                assert frame is not None
                position = int(frame.name[1:])
                assert first_sample(frame) == position % 32768
                assert frame.sequence_start is (position != expected or position == 0)
                heard = position + size
                latest_ns = second_ns - (sent - heard) * second_ns // 16000
                assert frame.captured_ns >= latest_ns - 1, "older than it can be"
                expected = heard
        snapshot = source.snapshot()
        assert snapshot.taken + snapshot.skipped + len(source._waiting) == frames
        assert len(source._waiting) <= max(2, -(-4000 // size))

    asyncio.run(check())


@pytest.fixture
def tone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An ALSA device that hears a ramp, as fast as it is read, then silence."""
    (tmp_path / "ramp.raw").write_bytes(ramp(0, 30000))
    config = tmp_path / "asound.conf"
    config.write_text(
        "</usr/share/alsa/alsa.conf>\n"
        f'pcm.ramp {{ type file slave.pcm "null" file "/dev/null" infile "{tmp_path}/ramp.raw" format "raw" }}\n'
    )
    monkeypatch.setenv("ALSA_CONFIG_PATH", str(config))
    return "ramp"


PROGRAMS = [pytest.param("arecord", marks=needs_arecord), pytest.param("ffmpeg", marks=needs_ffmpeg)]
ONLY_60000_BYTES = {"arecord": ("-s", "30000"), "ffmpeg": ("-fs", "60000")}


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_microphone_is_heard_sample_by_sample(program: str, tone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(section: MicrophoneSource) -> Launch:
        launch = presets.microphone(section, [program])
        *argv, last = launch.argv
        return dataclasses.replace(launch, argv=(*argv, *ONLY_60000_BYTES[program], last))  # `last` needs no value

    monkeypatch.setattr(sources, "_microphone", find)
    monkeypatch.setattr(microphone, "MOST_WAITING_NS", 1_900 * NS_PER_MS)  # it comes all at once here
    async with opened(MicrophoneSource(500, device=tone)) as source:
        for run in range(2):
            for number in range(60):
                frame = await next_of(source)
                assert (frame.datatype, frame.shape) == ("FP32", (1, 500))
                assert frame.name == f"@{(run * 60 + number) * 500}"
                assert frame.sequence_start is (number == 0)
                assert first_sample(frame) == number * 500
        assert source.snapshot().skipped == 0


@needs_arecord
@pytest.mark.system
@pytest.mark.slow
async def test_sound_that_nobody_takes_is_dropped(tone: str) -> None:
    async with opened(MicrophoneSource(500, device=tone)) as source:
        await eventually(lambda: source.snapshot().skipped > 1000)
        assert (await next_of(source)).sequence_start


@needs_arecord
@pytest.mark.system
@pytest.mark.slow
async def test_a_microphone_that_is_not_there_is_told() -> None:
    async with opened(MicrophoneSource(512, device="hw:9")) as source:
        await eventually(lambda: source.snapshot().problem)
        assert source.snapshot().problem.startswith("arecord exited with code 1: ")
        assert "No such file or directory" in source.snapshot().problem
