from __future__ import annotations

import io
import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edgeinfer.config import CommandSource
from edgeinfer.pipeline.framing import (
    FixedFramer,
    Framer,
    FramingError,
    JpegFramer,
    LengthFramer,
    LineFramer,
    make_framer,
)

MOST = 1 << 16


def _jpeg(seed: int, *, progressive: bool = False, thumbnail: bool = False, restarts: int = 0) -> bytes:
    out = io.BytesIO()
    image = Image.frombytes("RGB", (64, 8), bytes((seed * 7 + index * index) % 256 for index in range(64 * 8 * 3)))
    extra = {"exif": b"Exif\0\0" + _jpeg(seed + 1)} if thumbnail else {}
    image.save(out, "JPEG", progressive=progressive, quality=90, restart_marker_blocks=restarts, **extra)
    return out.getvalue()


JPEGS = [_jpeg(1), _jpeg(2, progressive=True), _jpeg(3, thumbnail=True), _jpeg(4), _jpeg(5, restarts=1)]
assert b"\xff\xd0" in JPEGS[-1], "the last one has restart markers inside its scan"


def _chop(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(edges)]


def _feed(framer: Framer, pieces: list[bytes]) -> list[bytes]:
    return [frame for piece in pieces for frame in framer.feed(piece)]


frames = st.lists(st.binary(min_size=1, max_size=50), max_size=6)
cuts = st.lists(st.integers(0, 10_000), max_size=12)


@given(frames, cuts)
def test_length_framing_survives_any_chopping(sent: list[bytes], cuts: list[int]) -> None:
    framer = LengthFramer(MOST)
    stream = b"".join(struct.pack("<I", len(frame)) + frame for frame in sent)
    assert _feed(framer, _chop(stream, cuts)) == sent
    assert framer.pending_bytes == 0


@given(st.lists(st.binary(min_size=7, max_size=7), max_size=6), cuts)
def test_fixed_framing_survives_any_chopping(sent: list[bytes], cuts: list[int]) -> None:
    framer = FixedFramer(7)
    assert _feed(framer, _chop(b"".join(sent) + b"rest", cuts)) == sent
    assert framer.pending_bytes == 4


@given(st.lists(st.text(st.characters(blacklist_categories=["Cc", "Cs"]), min_size=1), max_size=6), cuts, st.booleans())
def test_lines_survive_any_chopping(sent: list[str], cuts: list[int], dos: bool) -> None:
    end = "\r\n" if dos else "\n"
    stream = "".join(line + end for line in sent).encode()
    assert [frame.decode() for frame in _feed(LineFramer(MOST), _chop(stream, cuts))] == sent


@given(
    st.lists(st.sampled_from(JPEGS), max_size=5),
    st.sampled_from([b"", b"\r\n--frame\r\nContent-Type: image/jpeg\r\n\r\n", b"\xff", b"\xff\xd9"]),
    cuts,
)
def test_jpegs_survive_any_chopping_thumbnails_and_multipart_boundaries(
    sent: list[bytes], between: bytes, cuts: list[int]
) -> None:
    stream = between.join([b"", *sent, b""])
    assert _feed(JpegFramer(MOST), _chop(stream, cuts)) == sent


def test_a_jpeg_stream_that_was_joined_in_the_middle_finds_its_way() -> None:
    assert _feed(JpegFramer(MOST), [JPEGS[0][100:] + JPEGS[1] + JPEGS[3]]) in ([JPEGS[1], JPEGS[3]], [JPEGS[3]])


@given(st.lists(st.binary(max_size=200), max_size=10), st.sampled_from(["length", "fixed", "jpeg", "lines"]))
def test_any_stream_gives_frames_or_a_framing_error_in_bounded_memory(pieces: list[bytes], framing: str) -> None:
    framer = make_framer(CommandSource(argv=["x"], framing=framing, frame_bytes=64), max_frame_bytes=256)
    try:
        for piece in pieces:
            framer.feed(piece)
            assert framer.pending_bytes <= 256 + 200
    except FramingError:
        return


def test_frames_of_a_fixed_size_that_no_frame_has_are_refused() -> None:
    with pytest.raises(FramingError, match="frame_bytes is 64 MiB, at most 32 MiB"):
        make_framer(CommandSource(argv=["x"], framing="fixed", frame_bytes=64 << 20))


@pytest.mark.parametrize(
    ("framer", "stream", "text"),
    [
        (LengthFramer(1000), struct.pack("<I", 1001), "announces"),
        (LineFramer(10), b"x" * 11, "a line has more"),
        (JpegFramer(1000), b"\xff\xd8\xff\xe0" + struct.pack(">H", 60000) + bytes(2000), "no end"),
    ],
)
def test_a_frame_beyond_the_bound_is_an_error_before_it_is_whole(framer: Framer, stream: bytes, text: str) -> None:
    with pytest.raises(FramingError, match=text):
        framer.feed(stream)


@given(st.integers(1, 7), st.lists(st.binary(max_size=40), max_size=10))
def test_of_frames_that_come_at_once_only_the_newest_are_cut_and_the_others_counted(
    size: int, pieces: list[bytes]
) -> None:
    every, newest = FixedFramer(size), FixedFramer(size, newest=1)
    for piece in pieces:
        frames, last = every.feed(piece), newest.feed(piece)
        assert last == frames[-1:]
        assert newest.skipped + len(last) == len(frames)
    stream = b"".join(len(piece).to_bytes(4, "little") + piece for piece in pieces)
    length = LengthFramer(100, newest=2)
    assert length.feed(stream) == pieces[-2:]
    assert length.skipped == max(0, len(pieces) - 2)
