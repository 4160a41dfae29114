"""Read, resample and write the little audio that recipes need, with NumPy and the standard library only.

Samples are mono float32 in -1..1.
"""

from __future__ import annotations

import io
import wave
from pathlib import Path

import numpy as np

from edgeinfer_tools.faults import DataRefused
from edgeinfer_tools.samples import Array

TAPS_PER_FACTOR = 32
"""Length of the low-pass filter per factor of decimation: about 80 dB of stop band with a Blackman window."""


def read_wav(path: Path, *, sample_rate_hz: int) -> Array:
    """Return the samples of a 16-bit WAV, brought down to `sample_rate_hz`.

    Raises:
        DataRefused: not 16 bits, or a rate that is no whole multiple.
    """
    with wave.open(str(path), "rb") as file:
        rate, width, channels = file.getframerate(), file.getsampwidth(), file.getnchannels()
        if width != 2 or rate % sample_rate_hz:
            raise DataRefused(
                f"{path.name} has {8 * width} bits at {rate} Hz; "
                f"16 bits at a multiple of {sample_rate_hz} Hz can be read"
            )
        frames = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, channels)
    samples = frames.mean(axis=1, dtype=np.float32) / np.float32(32768)
    return decimate(samples, rate // sample_rate_hz)


def decimate(samples: Array, factor: int) -> Array:
    """Return every `factor`-th sample after a windowed-sinc low-pass at 90 % of the new Nyquist frequency."""
    if factor == 1:
        return samples
    half = TAPS_PER_FACTOR * factor // 2
    position = np.arange(-half, half + 1)
    cutoff = 0.9 / factor
    kernel = np.sinc(position * cutoff) * np.blackman(position.size)
    kernel /= kernel.sum()
    found: Array = np.convolve(samples, kernel, mode="same")[::factor].astype(np.float32)
    return found


def write_wav(samples: Array, *, sample_rate_hz: int) -> bytes:
    """Return the samples as a mono 16-bit WAV file."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sample_rate_hz)
        file.writeframes((np.clip(samples, -1, 32767 / 32768) * 32768).round().astype("<i2").tobytes())
    return out.getvalue()
