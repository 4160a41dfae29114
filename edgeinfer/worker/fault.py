"""What ends a load or a run inside a worker, as a short stable word and a sentence of our own.

The words are counted by the daemon, so they are few; the sentence is for people and never a raw C++ trace.
"""

from __future__ import annotations

from typing import Final

INPUT_INVALID: Final = "input_invalid"
CANCELLED: Final = "cancelled"
OUT_OF_MEMORY: Final = "out_of_memory"


class Fault(Exception):
    """A load or a run that cannot go on. Worker's side only; it never leaves the process as an exception."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")
