"""Know which variants crash, also from before a restart: the one owner of crash counts and quarantines.

A variant is on trial until it has served for a quiet time (`CrashPolicy.window_ns`); then it is proven and its crashes
are forgiven. Crashes of its workers count, loads that crash or hang count, and so does a service that itself ended,
not cleanly and in the same boot, while a variant was on trial; of several the one that was loaded last is blamed.
A power cut blames nobody. What is known is written in `storage` soon after, and never waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor

from msgspec.structs import replace

from edgeinfer.execution.crashes import CrashPolicy
from edgeinfer.store.crashes import MAX_DETAIL, CrashFile, CrashRecord, Records, VariantKey, bounded
from edgeinfer.store.store import Installed

_log = logging.getLogger(__name__)

_DIED_WITH_IT = "the service itself ended while it was being loaded or in its first minute"


class CrashBook:
    """Crash counts and quarantines by variant. Loop thread only; made inside the running loop."""

    def __init__(self, file: CrashFile, storage: Executor, *, boot: str, policy: CrashPolicy | None = None) -> None:
        """`boot` names the kernel's boot: what died with another one, a power cut ended."""
        self.degraded = False
        """The last write failed: after a restart, what happened today is not known."""
        self.policy = policy or CrashPolicy()
        self._file = file
        self._storage = storage
        self._boot = boot
        self._writes: set[asyncio.Future[None]] = set()
        records, problem = file.read()
        if problem:
            _log.warning("crash records start empty: %s", problem)
        self._records = blame(records, boot, self.policy)
        changes = {key: self._records.get(key) for key, record in records.items() if self._records.get(key) != record}
        if changes:  # a verdict that stays one, also when the next boot finds another name in the file
            self._write(changes)
        for record in self._records.values():
            if record.quarantined:
                _log.warning(
                    "quarantined model=%s version=%s variant=%s detail=%r",
                    record.model, record.version, record.key.variant, record.detail,
                )  # fmt: skip

    def crashes(self, key: VariantKey) -> int:
        """Return how often it has crashed in a row."""
        record = self._records.get(key)
        return record.crashes if record else 0

    def quarantined(self, runtime: str, model: str = "") -> list[CrashRecord]:
        """Return the quarantines under this runtime, of every model or of one."""
        return [
            record
            for record in self._records.values()
            if record.quarantined and record.key.runtime == runtime and model in {"", record.model}
        ]

    def begin(self, key: VariantKey, installed: Installed) -> None:
        """Note that a variant is about to be loaded: unless it is proven, the service may die of it."""
        record = self._record(key, installed)
        if not record.proven:
            self._put(replace(record, loading=self._boot))

    def crashed(self, key: VariantKey, installed: Installed, detail: str, *, crashes: int, quarantine: bool) -> None:
        """Note a crash, how many there were in a row with it, and whether the variant is left alone from now on."""
        record = self._record(key, installed)
        self._put(replace(record, crashes=crashes, quarantined=quarantine, detail=detail[:MAX_DETAIL]))

    def forgive(self, key: VariantKey) -> None:
        """Forget its crashes, because they had another cause (a compiled form, which is given up)."""
        record = self._records.get(key)
        if record is not None:
            self._put(replace(record, crashes=0, quarantined=False))

    def prove(self, key: VariantKey, installed: Installed) -> None:
        """Note that it has served for a quiet time."""
        record = self._record(key, installed)
        if not record.proven or record.crashes:
            self._put(replace(record, proven=True, crashes=0, loading="", detail=""))

    def keep_on_trial(self, keys: Iterable[VariantKey]) -> None:
        """Take the others off trial: they are not in memory any more, and nobody can die of them."""
        kept = set(keys)
        for record in list(self._records.values()):
            if record.loading and record.key not in kept:
                self._put(replace(record, loading=""))

    def lift(self, digest: str) -> None:
        """Give the variants of a bundle another chance."""
        for record in list(self._records.values()):
            if record.key.digest == digest and (record.crashes or record.quarantined):
                self._put(replace(record, crashes=0, quarantined=False, detail=""))

    def _record(self, key: VariantKey, installed: Installed) -> CrashRecord:
        manifest = installed.manifest
        return self._records.get(key) or CrashRecord(key, manifest.name, manifest.version)

    def _put(self, record: CrashRecord) -> None:
        if record == self._records.get(record.key):
            return
        self._records.pop(record.key, None)
        if not record.says_nothing:
            self._records[record.key] = record
        self._records = {kept.key: kept for kept in bounded(self._records.values())}
        self._write({record.key: record})

    def _write(self, changes: Mapping[VariantKey, CrashRecord | None]) -> None:
        write = asyncio.get_running_loop().run_in_executor(self._storage, self._file.write, changes)
        self._writes.add(write)
        write.add_done_callback(self._on_written)

    def _on_written(self, write: asyncio.Future[None]) -> None:
        self._writes.discard(write)
        error = None if write.cancelled() else write.exception()
        if error is None:
            self.degraded = False
        elif isinstance(error, OSError):
            if not self.degraded:
                _log.warning("crash records cannot be written path=%s error=%s", self._file.path, error)
            self.degraded = True
        else:
            raise error


def blame(records: Records, boot: str, policy: CrashPolicy) -> Records:
    """Return the records as they are after a start: whoever was on trial when the service ended is counted. Pure.

    Only in the same boot: a power cut, or somebody who pulls the plug, says nothing about a model.
    """
    suspects = [key for key, record in records.items() if record.loading == boot]
    judged = {key: replace(record, loading="") for key, record in records.items()}
    if suspects:
        last = judged.pop(suspects[-1])
        crashes = last.crashes + 1
        quarantined = last.quarantined or crashes >= policy.max_crashes
        judged[last.key] = replace(last, crashes=crashes, quarantined=quarantined, detail=_DIED_WITH_IT)
    return {key: record for key, record in judged.items() if not record.says_nothing}
