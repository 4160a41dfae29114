"""Handwritten digits with what they are, none of which the network was trained on (see network.py)."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from edgeinfer_tools.samples import Array, Media, Stream

CALIBRATION, SELECTION, EVALUATION = {9}, {5}, {0}
"""Which of every ten pictures."""
CALIBRATION_EACH = 5
"""Of the pictures that may calibrate every fifth does: 100."""


def calibration(files: Mapping[str, Path]) -> Iterator[Stream]:
    for index, stream in enumerate(_streams(files, CALIBRATION)):
        if index % CALIBRATION_EACH == 0:
            yield stream


def selection(files: Mapping[str, Path]) -> Iterator[Stream]:
    yield from _streams(files, SELECTION)


def evaluation(files: Mapping[str, Path]) -> Iterator[Stream]:
    yield from _streams(files, EVALUATION)


def golden(files: Mapping[str, Path]) -> Iterator[Stream]:
    """One each of 0, 4 and 9, lossless."""
    found = list(_streams(files, EVALUATION))
    for digit in ("0", "4", "9"):
        yield next(stream for stream in found if stream.label == digit)


def samples(files: Mapping[str, Path]) -> Iterator[tuple[str, bytes]]:
    for index, row in enumerate(_rows(files)[::250]):
        yield f"digit-{index:02}.png", _png(row)


def _streams(files: Mapping[str, Path], tenths: set[int]) -> Iterator[Stream]:
    for index, row in enumerate(_rows(files)):
        if index % 10 in tenths:
            yield Stream(f"digit {index}", [{"image": Media(_png(row), "image/png")}], str(int(row[-1])))


def _rows(files: Mapping[str, Path]) -> Array:
    """Return pixels and, last, the digit of every picture."""
    with gzip.open(files["mnist_5k.csv.gz"], "rt", encoding="ascii") as file:
        return np.loadtxt(file, delimiter=",", dtype=np.uint8)


def _png(row: Array) -> bytes:
    out = io.BytesIO()
    Image.fromarray(row[:-1].reshape(28, 28)).save(out, "PNG")
    return out.getvalue()
