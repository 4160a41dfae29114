"""Files of known kind, cut into the features that magika's own code makes of them.

The recipe names each file KIND/NUMBER. Of every four of a kind the first calibrates, the second is for choosing among
candidates, the other two judge: no file serves two of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from edgeinfer_tools.samples import Array, Stream

PART = 1024
BLOCK = 4096
"""So many bytes at either end are looked at, before white space is taken off."""
PADDING = 256


def calibration(files: Mapping[str, Path]) -> Iterator[Stream]:
    yield from _streams(files, {0})


def selection(files: Mapping[str, Path]) -> Iterator[Stream]:
    yield from _streams(files, {1})


def evaluation(files: Mapping[str, Path]) -> Iterator[Stream]:
    yield from _streams(files, {2, 3})


def features(content: bytes) -> Array:
    """Return what magika's "features extraction v2" makes of a file."""
    start = content[:BLOCK].lstrip()[:PART]
    end = content[-BLOCK:].rstrip()[-PART:]
    padded = np.full((1, 2 * PART), PADDING, np.int32)
    padded[0, : len(start)] = np.frombuffer(start, np.uint8)
    padded[0, 2 * PART - len(end) :] = np.frombuffer(end, np.uint8)
    return padded


def _streams(files: Mapping[str, Path], quarters: set[int]) -> Iterator[Stream]:
    for key, path in files.items():
        kind, _, number = key.partition("/")
        if int(number) % 4 in quarters:
            yield Stream(key, [{"bytes": features(path.read_bytes())}], kind)
