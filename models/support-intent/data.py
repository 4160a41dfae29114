"""Messages with the label that a reader would give them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from edgeinfer_tools.samples import Media, Stream

MESSAGES = [
    ("I was charged twice for my invoice", "support_request"),
    ("", "other"),
    ("Hello, hello, and THANKS for the lovely evening", "other"),
    ("Please refund me; the invoice shows an ERROR!", "support_request"),
    ("hello, is anybody there?", "other"),
    ("thanks, all fine now", "other"),
    ("Refund.", "support_request"),
    ("there is an error on my invoice", "support_request"),
    ("When do you open on Sunday?", "other"),
    ("I want my money back: charged, charged and charged again", "support_request"),
    ("Grüße aus Köln, 12:30 Uhr", "other"),
]


def evaluation(_files: Mapping[str, Path]) -> Iterator[Stream]:
    for index, (text, label) in enumerate(MESSAGES):
        yield Stream(f"message-{index}", [{"text": Media(text.encode(), "text/plain")}], label)


def samples(_files: Mapping[str, Path]) -> Iterator[tuple[str, bytes]]:
    for index, (text, _) in enumerate(MESSAGES):
        yield f"message-{index:02}.txt", text.encode()
