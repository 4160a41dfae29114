"""Remember which commands were carried out and what was answered, also across a restart and a power cut.

Owns one file. A change is written down before it is carried out, so that it is never carried out twice: if the service
dies in between, its reply after the restart is `failed(interrupted)`. Bounded: the oldest are forgotten first.
A file that is missing, empty or garbled means an empty memory; a disk that can't be written means a memory that ends
with the process, which `degraded` tells.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import msgspec

from edgeinfer.plain_file import read_plain
from edgeinfer.store.durable import write_atomically

log = logging.getLogger(__name__)

MAX_ENTRIES = 256
MAX_FILE_BYTES = 4 << 20
"""A longer file is none of ours and isn't read."""
MAX_REPLY_BYTES = 64 << 10
_SCHEMA = 1


class Entry(msgspec.Struct):
    """A command that was begun."""

    id: str
    verb: str
    fingerprint: str
    """Of verb and arguments: another command under the same id is a mistake of the sender."""
    topic: str
    correlation: bytes | None
    reply: bytes | None = None
    """The encoded reply; None while the command is being carried out."""


class _File(msgspec.Struct):
    schema: int
    entries: list[Entry]


class Journal:
    """The commands of the past. Loop thread only; the file is written in `storage`, one write after the other."""

    def __init__(self, path: Path | None, storage: Executor) -> None:
        self._path = path
        self._storage = storage
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._writing = asyncio.Lock()
        self.degraded = False
        """The last write failed: after a restart commands of today would be carried out again."""
        if path is not None:
            self._entries.update((entry.id, entry) for entry in _read(path))

    def find(self, command_id: str) -> Entry | None:
        """Return the entry of a command that was begun."""
        return self._entries.get(command_id)

    def interrupted(self) -> list[Entry]:
        """Return the commands that were begun and not finished: right after a start, those that a restart cut off."""
        return [entry for entry in self._entries.values() if entry.reply is None]

    async def begin(self, entry: Entry) -> None:
        """Write a command down; returns when it is safe to carry it out."""
        self._entries[entry.id] = entry
        while len(self._entries) > MAX_ENTRIES:
            self._entries.popitem(last=False)
        await self._write()

    async def finish(self, command_id: str, reply: bytes) -> None:
        """Write down what was answered."""
        if (entry := self._entries.get(command_id)) is not None:
            entry.reply = reply
            await self._write()

    async def _write(self) -> None:
        if self._path is None:
            return
        async with self._writing:
            data = msgspec.json.encode(_File(_SCHEMA, list(self._entries.values())))
            try:
                await asyncio.get_running_loop().run_in_executor(self._storage, write_atomically, self._path, data)
            except OSError as error:
                if not self.degraded:
                    log.warning("journal_unwritable path=%s error=%s", self._path, error)
                self.degraded = True
            else:
                self.degraded = False


def fingerprint(verb: str, arguments: Any) -> str:
    """Return what tells two commands apart."""
    return hashlib.sha256(msgspec.json.encode([verb, arguments])).hexdigest()[:16]


def _read(path: Path) -> list[Entry]:
    try:
        content = msgspec.json.decode(read_plain(path, MAX_FILE_BYTES, follow=False), type=_File)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:  # the decoder's errors are ValueErrors
        return _unreadable(path, error)
    if content.schema != _SCHEMA:
        return _unreadable(path, "written by another version")
    return content.entries[-MAX_ENTRIES:]


def _unreadable(path: Path, why: object) -> list[Entry]:
    log.warning("journal_unreadable path=%s why=%s consequence=starts_empty", path, why)
    return []
