"""Keep what a search has found out, so that the next one goes on from there after Ctrl-C, a crash or a time limit.

One file of JSON lines in the cache, named by a digest of all that the facts depend on: model, evaluation data, gates,
versions. A line is written when a stage of a candidate is done, and the last line of a candidate counts; half a line at
the end, from a crash, is passed over. Only facts are kept, no decisions: another budget asks them anew.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from edgeinfer.artifact.profile import OperatingCost


class GateScore(msgspec.Struct, frozen=True, omit_defaults=True):
    """The value of one gate's metric."""

    metric: str
    output: str
    value: float
    minimum: float | None = None
    maximum: float | None = None


class Scores(msgspec.Struct, frozen=True):
    """How good a candidate was on so many requests."""

    requests: int
    quality: float
    """1.0 = as the float model, from the first gate."""
    gates: list[GateScore]


class Facts(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """All that is known of one candidate; None: not looked at yet."""

    key: str
    name: str
    refused: str = ""
    """Why it cannot be made or run."""
    size_bytes: int | None = None
    digest: str = ""
    """Of the artefact's bytes: equal ones need no second look."""
    integer_share: float = 0.0
    """Of the multiplications, those done in 8 bits."""
    screen: Scores | None = None
    """On a part of the evaluation set."""
    full: Scores | None = None
    costs: dict[str, list[OperatingCost]] = {}
    """By where they were measured."""
    notes: list[str] = []
    seconds: float = 0.0
    """Time that all of it took."""


class Journal:
    """The facts of one search, in memory and in a file."""

    def __init__(self, path: Path | None) -> None:
        """Read what is there; without a path nothing is kept."""
        self._path = path
        self._facts: dict[str, Facts] = {}
        if path is not None and path.is_file():
            for line in path.read_bytes().splitlines():
                try:
                    facts = msgspec.json.decode(line, type=Facts)
                except msgspec.MsgspecError:
                    continue  # half a line of a crash
                self._facts[facts.key] = facts

    @property
    def count(self) -> int:
        """How many candidates something is known of."""
        return len(self._facts)

    def find(self, key: str) -> Facts | None:
        """Return what is known of a candidate."""
        return self._facts.get(key)

    def keep(self, facts: Facts) -> None:
        """Write facts down, replacing what was known of the candidate."""
        if self._facts.get(facts.key) == facts:
            return
        self._facts[facts.key] = facts
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, b"\n" * torn + msgspec.json.encode(facts) + b"\n")
        finally:
            os.close(descriptor)


def search_key(parts: Iterable[str | bytes]) -> str:
    """Return a digest of all that the facts depend on."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]
