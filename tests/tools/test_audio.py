"""Resampling keeps what a voice has and lets nothing fold back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeinfer_tools.audio import decimate, read_wav, write_wav
from edgeinfer_tools.faults import DataRefused
from edgeinfer_tools.samples import Array


def tone(frequency_hz: float, rate_hz: int = 48000) -> Array:
    return np.sin(2 * np.pi * frequency_hz * np.arange(rate_hz) / rate_hz).astype(np.float32)


def power(samples: Array) -> float:
    return float(np.mean(samples[200:-200] ** 2))


@pytest.mark.parametrize("frequency_hz", [200, 1000, 6000])
def test_what_the_new_rate_can_hold_stays(frequency_hz: float) -> None:
    found = decimate(tone(frequency_hz), 3)
    np.testing.assert_allclose(found[200:-200], tone(frequency_hz, 16000)[200:-200], atol=0.01)


@pytest.mark.parametrize("frequency_hz", [9000, 10000, 15000, 20000])
def test_what_it_cannot_hold_is_gone(frequency_hz: float) -> None:
    assert power(decimate(tone(frequency_hz), 3)) < 1e-6 * power(tone(frequency_hz))


def test_a_wav_comes_back_within_half_a_step(tmp_path: Path) -> None:
    path = tmp_path / "tone.wav"
    path.write_bytes(write_wav(0.5 * tone(440, 16000), sample_rate_hz=16000))
    np.testing.assert_allclose(read_wav(path, sample_rate_hz=16000), 0.5 * tone(440, 16000), atol=0.51 / 32768)


def test_a_rate_that_is_no_multiple_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tone.wav"
    path.write_bytes(write_wav(tone(440, 44100), sample_rate_hz=44100))
    with pytest.raises(DataRefused, match=r"tone\.wav has 16 bits at 44100 Hz"):
        read_wav(path, sample_rate_hz=16000)
