"""Turn encoded media (JPEG, PNG, WAV, text) into a declared input's array.

Worker's side. Every size is checked against the manifest before memory is taken for it, so a small file that claims to
be huge costs nothing. Frames are taken as stored: an EXIF orientation is not applied. Which tensor of a request is
a medium is `feed`'s to say.
"""

from __future__ import annotations

import io
import re
import struct
import wave
import zlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edgeinfer.worker.fault import INPUT_INVALID, Fault

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgeinfer.artifact.manifest import Decode, TensorSpec

_IMAGE_FORMATS: Final = {"image/jpeg": "JPEG", "image/png": "PNG"}
_AUDIO_TYPES: Final = {"audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave"}
_TEXT_TYPES: Final = {"text/plain"}
_IMAGE_MODES: Final = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"}
"""8 bits a channel; deeper ones would be clipped in silence."""
_SHOWN_BYTES: Final = 12
_PILLOW_ERRORS: Final = (
    OSError, ValueError, SyntaxError, LookupError, TypeError, ArithmeticError, EOFError, struct.error, zlib.error
)  # fmt: skip
"""Pillow's readers let the errors of their parsing through as they come."""


def decode(spec: TensorSpec, content_type: str, data: memoryview) -> NDArray[Any]:
    """Return the array of the input `spec` that the medium `data` holds.

    Raises:
        Fault: `input_invalid`, naming the input, what was expected and what came.
    """
    rule = spec.decode
    kind = content_type.partition(";")[0].strip().lower()
    if rule is None:
        raise Fault(INPUT_INVALID, f"input {spec.name!r} takes a tensor, not an encoded {content_type}")
    if rule.kind == "image" and kind in _IMAGE_FORMATS:
        return _image(spec, rule, _IMAGE_FORMATS[kind], data)
    if rule.kind == "audio" and kind in _AUDIO_TYPES:
        return _audio(spec, rule, data)
    if rule.kind == "words" and kind in _TEXT_TYPES:
        return _words(spec, rule, data)
    accepted = {"image": _IMAGE_FORMATS, "audio": ["audio/wav"], "words": _TEXT_TYPES}[rule.kind]
    raise Fault(INPUT_INVALID, f"input {spec.name!r} takes {' or '.join(sorted(accepted))}, not {content_type!r}")


def _image(spec: TensorSpec, rule: Decode, form: str, data: memoryview) -> NDArray[Any]:
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - 10 MB that only image models pay

    Image.MAX_IMAGE_PIXELS = None  # the manifest's bound holds, and is checked before anything is decoded
    try:
        with Image.open(io.BytesIO(data), formats=[form]) as image:  # reads the header only
            width, height = image.size
            if width * height > rule.max_pixels:
                raise Fault(
                    INPUT_INVALID,
                    f"input {spec.name!r}: the {form} has {width}x{height} pixels, at most {rule.max_pixels} are taken",
                )
            _check_dims(spec, [1, height, width, 3])
            if image.mode not in _IMAGE_MODES:
                raise Fault(
                    INPUT_INVALID, f"input {spec.name!r}: a {form} of mode {image.mode} has not 8 bits a channel"
                )
            return np.asarray(image.convert("RGB"), dtype=np.uint8)[np.newaxis]
    except UnidentifiedImageError as error:  # its text names our buffer
        begins = bytes(data[:_SHOWN_BYTES])
        raise Fault(
            INPUT_INVALID,
            f"input {spec.name!r} cannot be read: not a JPEG or PNG as its content type says ({form}); "
            f"{len(data)} bytes came, the first are {begins!r}",
        ) from error
    except _PILLOW_ERRORS as error:
        raise Fault(INPUT_INVALID, f"input {spec.name!r} is not a readable {form}: {_first_line(error)}") from error


def _audio(spec: TensorSpec, rule: Decode, data: memoryview) -> NDArray[Any]:
    try:
        with wave.open(io.BytesIO(data), "rb") as file:
            channels, width, rate, frames, *_ = file.getparams()
            if rate != rule.sample_rate_hz:
                raise Fault(INPUT_INVALID, f"input {spec.name!r} takes {rule.sample_rate_hz} Hz, the WAV has {rate} Hz")
            frames = min(frames, len(data) // max(1, channels * width))  # a header may claim any number
            _check_dims(spec, [1, frames])
            raw = file.readframes(frames)
    except (wave.Error, EOFError, struct.error, ValueError, OSError) as error:
        raise Fault(INPUT_INVALID, f"input {spec.name!r} is not a readable WAV: {_first_line(error)}") from error
    if width not in {1, 2, 3, 4}:
        raise Fault(INPUT_INVALID, f"input {spec.name!r}: a WAV of {8 * width} bits is not read")
    samples = _pcm(raw[: len(raw) - len(raw) % (width * channels)], width).reshape(-1, channels)
    mono = samples[:, 0] if channels == 1 else samples.mean(axis=1, dtype=np.float32)
    return np.ascontiguousarray(mono, dtype=np.float32)[np.newaxis]


def _pcm(raw: bytes, width: int) -> NDArray[np.float32]:
    """Return little-endian PCM samples as floats in -1..1 (8-bit WAV is unsigned)."""
    if width == 1:
        return (np.frombuffer(raw, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
    if width == 3:
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        return wide.reshape(-1).view("<i4").astype(np.float32) / np.float32(1 << 31)
    return np.frombuffer(raw, f"<i{width}").astype(np.float32) / np.float32(1 << (8 * width - 1))


def _words(spec: TensorSpec, rule: Decode, data: memoryview) -> NDArray[Any]:
    try:
        text = bytes(data).decode()
    except UnicodeDecodeError as error:
        raise Fault(INPUT_INVALID, f"input {spec.name!r} is not UTF-8 text: {error.reason} at {error.start}") from error
    words: list[str] = []
    for match in re.finditer(rule.pattern, text.lower() if rule.lowercase else text):
        if len(words) == rule.max_items:
            raise Fault(INPUT_INVALID, f"input {spec.name!r} has more than {rule.max_items} words")
        words.append(match.group())
    _check_dims(spec, [len(words)])
    array = np.empty(len(words), dtype=object)
    array[:] = words
    return array


def _check_dims(spec: TensorSpec, dims: list[int]) -> None:
    """Refuse a medium whose tensor would not fit the contract, before it is decoded."""
    fits = len(dims) == len(spec.shape) and all(
        dim == want or (want == -1 and dim <= bound)
        for dim, want, bound in zip(dims, spec.shape, spec.bound, strict=True)
    )
    if not fits:
        limit = f", at most {spec.max_shape}" if spec.max_shape else ""
        raise Fault(INPUT_INVALID, f"input {spec.name!r} takes shape {spec.shape}{limit}; this medium gives {dims}")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__
