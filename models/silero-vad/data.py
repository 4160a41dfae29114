"""Spoken words, clean and in noise, and what is not speech; cut into the chunks that a microphone loop sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from edgeinfer_tools.audio import read_wav, write_wav
from edgeinfer_tools.samples import Array, Media, Stream

CHUNK = 512
RATE_HZ = 16000
SPEECH = ["Front_Center.wav", "Front_Left.wav", "Front_Right.wav", "Rear_Center.wav",
          "Rear_Left.wav", "Rear_Right.wav", "Side_Left.wav", "Side_Right.wav"]  # fmt: skip


def evaluation(files: Mapping[str, Path]) -> Iterator[Stream]:
    noise = _read(files, "Noise.wav")
    for name in SPEECH:
        speech = _read(files, name)
        yield Stream(name, _chunks(speech), "speech")
        yield Stream(f"quiet {name}", _chunks(0.2 * speech), "speech")
        yield Stream(f"noisy {name}", _chunks(_mix(speech, noise, snr_db=10)), "speech")
    for gain in (0.05, 0.3, 1.0):
        yield Stream(f"noise x{gain}", _chunks(gain * noise), "silence")
    yield Stream("digital silence", _chunks(np.zeros(RATE_HZ * 2, np.float32)), "silence")


def golden(files: Mapping[str, Path]) -> Iterator[Stream]:
    """One sequence from inside a word; one chunk comes as a WAV, as a source may send it."""
    speech = _read(files, "Front_Center.wav")
    chunks = _chunks(speech[8 * CHUNK : 16 * CHUNK])
    chunks[3] = {"audio": Media(write_wav(speech[11 * CHUNK : 12 * CHUNK], sample_rate_hz=RATE_HZ), "audio/wav")}
    yield Stream("golden", chunks)


def samples(files: Mapping[str, Path]) -> Iterator[tuple[str, bytes]]:
    """One recording: words, pauses and noise in turn, about half a minute."""
    noise = _read(files, "Noise.wav")
    pause = np.zeros(RATE_HZ // 2, np.float32)
    parts: list[Array] = []
    for index, name in enumerate(SPEECH):
        parts += [_read(files, name), pause, 0.2 * noise if index % 2 else pause]
    yield "conversation.wav", write_wav(np.concatenate(parts), sample_rate_hz=RATE_HZ)


def _read(files: Mapping[str, Path], name: str) -> Array:
    return read_wav(files[name], sample_rate_hz=RATE_HZ)


def _chunks(samples: Array) -> list[dict[str, Array | Media]]:
    whole = len(samples) // CHUNK * CHUNK
    return [{"audio": chunk[np.newaxis]} for chunk in samples[:whole].astype(np.float32).reshape(-1, CHUNK)]


def _mix(speech: Array, noise: Array, *, snr_db: float) -> Array:
    """Return speech with noise at a ratio of their powers."""
    covering = np.resize(noise, speech.shape)
    gain = np.sqrt(np.mean(speech**2) / np.mean(covering**2) / 10 ** (snr_db / 10))
    mixed: Array = np.clip(speech + gain * covering, -1, 1)
    return mixed
