"""Name the options of a call, and refuse others: a misspelt deadline must not be none.

What an option means is the daemon's to check; docs/client.md has the table.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

OPTIONS: Final = (
    "deadline_ms", "version", "outputs", "priority", "firm", "accept_late", "scope", "sequence_id", "sequence_start",
)  # fmt: skip
"""Every option of `infer`, in the order of the documentation."""


def check_options(given: Iterable[str]) -> None:
    """Refuse options that no call has.

    Raises:
        TypeError: there are such, and it names them.
    """
    unknown = [name for name in given if name not in OPTIONS]
    if not unknown:
        return
    said = []
    for name in unknown:
        near = difflib.get_close_matches(name, OPTIONS, 1)
        said.append(f"{name!r} (did you mean {near[0]!r}?)" if near else repr(name))
    raise TypeError(
        f"infer() has no option {', '.join(said)}; there are {', '.join(OPTIONS)}. "
        f"Inputs are given by name in a mapping: infer(model, {{{unknown[0]!r}: ...}})"
    )
