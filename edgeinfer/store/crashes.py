"""Keep what is known of each variant's crashes, through restarts and power cuts.

    STATE_DIR/crashes.json     by (bundle digest, variant, version of ONNX Runtime): see `CrashRecord`
    STATE_DIR/crashes.lock     held for the moment of a change: the service and the command line share the file

Files only: what a crash leads to is `edgeinfer.execution`'s. A file that is missing, empty or garbled means that
nothing is known, and is told. Bounded: what matters least is forgotten first. Everything here blocks: call `write`
from the storage thread.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from edgeinfer.plain_file import read_plain
from edgeinfer.store.durable import write_atomically

SCHEMA = 1
MAX_RECORDS = 128
"""Two variants each of sixty-four bundles; a device has a handful."""
MAX_DETAIL = 300
_MAX_BYTES = 1 << 20


class VariantKey(msgspec.Struct, frozen=True):
    """One variant of one bundle under one runtime: with another of any of them it is another matter."""

    digest: str
    """Of the bundle."""
    variant: str
    runtime: str
    """Version of ONNX Runtime."""


class CrashRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of one variant."""

    key: VariantKey
    model: str
    version: str
    crashes: int = 0
    """In a row: none of them was followed by a quiet time."""
    quarantined: bool = False
    proven: bool = False
    """It has once served for a quiet time."""
    loading: str = ""
    """The boot in which it was loaded last, until it is proven: a service that ends meanwhile may have died of it."""
    detail: str = ""
    """How it crashed last."""

    @property
    def says_nothing(self) -> bool:
        """Whether it may as well be forgotten."""
        return not (self.crashes or self.quarantined or self.proven or self.loading)

    @property
    def title(self) -> str:
        """Version and variant, and why, for people."""
        return f"{self.version} {self.key.variant}"


Records = dict[VariantKey, CrashRecord]


class CrashFile:
    """crashes.json. Several processes may change it, each what it knows."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "crashes.json"
        self._lock = folder / "crashes.lock"

    def read(self) -> tuple[Records, str]:
        """Return the records, oldest first, and what was wrong with the file, in words."""
        try:
            raw = read_plain(self.path, _MAX_BYTES, follow=False)
        except FileNotFoundError:
            return {}, ""
        except OSError as error:
            return {}, f"{self.path} cannot be read: {error.strerror}"
        try:
            content = msgspec.json.decode(raw, type=_Content)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return {}, f"{self.path} is damaged ({len(raw)} bytes): {error}"
        if content.schema != SCHEMA:
            return {}, f"{self.path} has schema {content.schema}, this edgeinfer reads {SCHEMA}"
        return {record.key: record for record in content.records}, ""

    def write(self, changes: Mapping[VariantKey, CrashRecord | None]) -> None:
        """Put these records in (None: take it out), after what somebody else has written meanwhile.

        Raises:
            OSError: it cannot be written; the file is as it was.
        """
        self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            records, _ = self.read()
            for key, record in changes.items():
                records.pop(key, None)  # the newest is the last
                if record is not None and not record.says_nothing:
                    records[key] = record
            write_atomically(self.path, _encode(bounded(records.values())))
        finally:
            os.close(lock)

    def forget(self, digest: str) -> None:
        """Forget what is known of a bundle: it was tried anew, or is gone.

        Raises:
            OSError: it cannot be written.
        """
        records, _ = self.read()
        known = [key for key in records if key.digest == digest]
        if known:
            self.write(dict.fromkeys(known))

    def quarantined(self, digest: str) -> list[CrashRecord]:
        """Return the quarantines of a bundle, under whatever runtime."""
        return [record for key, record in self.read()[0].items() if key.digest == digest and record.quarantined]


def bounded(records: Iterable[CrashRecord]) -> list[CrashRecord]:
    """Return at most `MAX_RECORDS`, in order, the oldest forgotten first, and quarantines last."""
    kept = list(records)
    excess = max(0, len(kept) - MAX_RECORDS)
    order = sorted(kept, key=lambda record: record.quarantined)  # stable: the oldest first among equals
    gone = {record.key for record in order[:excess]}
    return [record for record in kept if record.key not in gone]


class _Content(msgspec.Struct, frozen=True):
    schema: int
    records: list[CrashRecord]


def _encode(records: list[CrashRecord]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(_Content(SCHEMA, records)), indent=1) + b"\n"
