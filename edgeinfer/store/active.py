"""Remember which version of each model is active, through power cuts.

`active.json` is small and written whole; the last sound one is kept as `active.json.bak`. A file that a power cut or a
failing card left empty, half or full of zeros is passed over, never rotated over the good copy, and reported. With
neither readable the caller decides from what is installed.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgeinfer.plain_file import read_plain
from edgeinfer.store.durable import write_atomically

SCHEMA = 1
_MAX_BYTES = 1 << 20


class Choice(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which installation of a model is used, and which was before (what a rollback returns to)."""

    active: str
    """Folder name, `VERSION-DIGEST12`."""
    previous: str = ""


class Choices(msgspec.Struct, frozen=True):
    """The whole of active.json."""

    schema: int = SCHEMA
    models: dict[str, Choice] = {}


class ActiveFile:
    """active.json and its backup. One process writes at a time: the store's lock sees to it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "active.json"
        self.backup = folder / "active.json.bak"

    def read(self) -> tuple[Choices | None, list[str]]:
        """Return the newest sound choices (None: there are none that can be read), and what was wrong, in words."""
        problems: list[str] = []
        for path in (self.path, self.backup):
            choices, problem = _read(path)
            if problem:
                problems.append(problem)
            if choices is not None:
                return choices, problems
        return None, problems

    def write(self, choices: Choices) -> None:
        """Replace the file durably, keeping the one before as backup if it is sound.

        Raises:
            OSError: it cannot be written; both files are as they were, or the backup is the newer of two sound ones.
        """
        current, _ = _read(self.path)
        if current is not None:
            write_atomically(self.backup, _encode(current))
        write_atomically(self.path, _encode(choices))


def _encode(choices: Choices) -> bytes:
    return msgspec.json.format(msgspec.json.encode(choices, order="sorted"), indent=2) + b"\n"


def _read(path: Path) -> tuple[Choices | None, str]:
    try:
        raw = read_plain(path, _MAX_BYTES, follow=False)
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{path} cannot be read: {error.strerror}"
    try:
        choices = msgspec.json.decode(raw, type=Choices)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return None, f"{path} is damaged ({len(raw)} bytes): {error}"
    if choices.schema != SCHEMA:
        return None, f"{path} has schema {choices.schema}, this edgeinfer reads {SCHEMA}"
    return choices, ""
