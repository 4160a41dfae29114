"""Media become the declared arrays; hostile, broken and oversize ones are refused before they cost memory."""

from __future__ import annotations

import io
import struct
import tracemalloc
import wave
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from edgeinfer.artifact.manifest import Decode, TensorSpec
from edgeinfer.worker.decode import decode
from edgeinfer.worker.fault import Fault

FRAME = TensorSpec("frame", "UINT8", [1, -1, -1, 3], [1, 1080, 1920, 3], decode=Decode("image"))
SOUND = TensorSpec("sound", "FP32", [1, -1], [1, 16_000], decode=Decode("audio", sample_rate_hz=16_000))
WORDS = TensorSpec("words", "BYTES", [-1], [16], decode=Decode("words", pattern="[a-z]+", lowercase=True, max_items=4))


def picture(form: str, size: tuple[int, int] = (64, 48), mode: str = "RGB") -> bytes:
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (size[1], size[0], 3), np.uint8)).convert(mode)
    image.save(buffer := io.BytesIO(), form)
    return buffer.getvalue()


def wav(samples: np.ndarray, rate: int = 16_000, width: int = 2) -> bytes:
    with wave.open(buffer := io.BytesIO(), "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return buffer.getvalue()


def refusal(spec: TensorSpec, content_type: str, data: bytes) -> str:
    with pytest.raises(Fault) as caught:
        decode(spec, content_type, memoryview(data))
    assert caught.value.reason == "input_invalid"
    assert repr(spec.name) in caught.value.detail
    return caught.value.detail


def test_png_is_exact_and_jpeg_is_rgb_with_the_right_shape() -> None:
    rng = np.random.default_rng(0)
    expected = rng.integers(0, 255, (48, 64, 3), np.uint8)
    np.testing.assert_array_equal(decode(FRAME, "image/png", memoryview(picture("PNG")))[0], expected)
    jpeg = decode(FRAME, "image/jpeg", memoryview(picture("JPEG")))
    assert jpeg.shape == (1, 48, 64, 3)
    assert jpeg.dtype == np.uint8


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1"])
def test_other_eight_bit_pictures_become_rgb_too(mode: str) -> None:
    assert decode(FRAME, "image/png", memoryview(picture("PNG", mode=mode))).shape == (1, 48, 64, 3)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes that claims that size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("size", "words"),
    [((30_000, 30_000), "30000x30000 pixels, at most 16777216"), ((4000, 4000), r"[1, 4000, 4000, 3]")],
)
def test_picture_that_claims_to_be_huge_is_refused_before_memory_is_taken(size: tuple[int, int], words: str) -> None:
    data = bomb(*size)
    decode(FRAME, "image/png", memoryview(picture("PNG")))  # Pillow is loaded
    tracemalloc.start()
    try:
        assert words in refusal(FRAME, "image/png", data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
@given(cut=st.integers(0, 2000), flips=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 255)), max_size=8))
@settings(max_examples=60, deadline=None)
def test_damaged_pictures_are_refused_or_decoded_but_never_anything_else(
    form: str, cut: int, flips: list[tuple[int, int]]
) -> None:
    data = bytearray(picture(form))
    for at, value in flips:
        data[at % len(data)] ^= value
    damaged = bytes(data[: len(data) - cut % len(data)])
    try:
        array = decode(FRAME, f"image/{form.lower()}", memoryview(damaged))
    except Fault as fault:
        verdict = fault.reason
    else:
        verdict = str(array.dtype)
    assert verdict in {"input_invalid", "uint8"}


def test_a_gif_that_calls_itself_a_jpeg_is_no_jpeg() -> None:
    told = refusal(FRAME, "image/jpeg", picture("GIF"))
    assert "cannot be read: not a JPEG or PNG as its content type says (JPEG)" in told
    assert "the first are b'GIF8" in told
    assert "object at" not in told


@pytest.mark.parametrize(("width", "kind", "top"), [(1, np.uint8, 255), (2, "<i2", 32767), (4, "<i4", 2**31 - 1)])
def test_sound_of_any_width_lies_between_minus_one_and_one(width: int, kind: str, top: int) -> None:
    low = 0 if width == 1 else -top - 1
    samples = np.array([low, top], kind)
    got = decode(SOUND, "audio/wav", memoryview(wav(samples, width=width)))
    assert got.shape == (1, 2)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got[0], [-1, 1], atol=0.01)


def test_twenty_four_bit_sound_and_two_channels_are_read() -> None:
    three = np.frombuffer(b"\x00\x00\x80\xff\xff\x7f", np.uint8)
    np.testing.assert_allclose(decode(SOUND, "audio/wav", memoryview(wav(three, width=3)))[0], [-1, 1], atol=1e-6)
    stereo = np.array([[16384, -16384], [16384, 0]], "<i2")
    np.testing.assert_allclose(decode(SOUND, "audio/x-wav", memoryview(wav(stereo)))[0], [0, 0.25])


def test_sound_at_another_rate_or_too_long_is_told_the_numbers() -> None:
    assert "takes 16000 Hz, the WAV has 8000 Hz" in refusal(SOUND, "audio/wav", wav(np.zeros(10, "<i2"), rate=8000))
    assert "[1, 16001]" in refusal(SOUND, "audio/wav", wav(np.zeros(16_001, "<i2")))


@given(st.binary(max_size=200))
def test_noise_is_no_sound(noise: bytes) -> None:
    assert "not a readable WAV" in refusal(SOUND, "audio/wav", b"RIFF" + noise)


def test_words_are_the_runs_that_the_pattern_matches() -> None:
    assert decode(WORDS, "text/plain; charset=utf-8", memoryview(b"Hello, 2 Worlds!")).tolist() == ["hello", "worlds"]
    assert decode(WORDS, "text/plain", memoryview(b"...")).shape == (0,)
    assert "more than 4 words" in refusal(WORDS, "text/plain", b"a b c d e")
    assert "not UTF-8" in refusal(WORDS, "text/plain", b"\xff\xfe")


def test_medium_of_another_kind_is_told_what_is_taken() -> None:
    assert "takes image/jpeg or image/png, not 'audio/wav'" in refusal(FRAME, "audio/wav", b"")
    plain = TensorSpec("x", "FP32", [1])
    assert "takes a tensor, not an encoded image/png" in refusal(plain, "image/png", b"")
