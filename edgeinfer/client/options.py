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
    near = {name: difflib.get_close_matches(name, OPTIONS, 1) for name in unknown}
    said = ", ".join(f"{name!r} (did you mean {near[name][0]!r}?)" if near[name] else repr(name) for name in unknown)
    strange = next((name for name in unknown if not near[name]), None)
    hint = f". Inputs are given by name in a mapping: infer(model, {{{strange!r}: ...}})" if strange else ""
    raise TypeError(f"infer() has no option {said}; there are {', '.join(OPTIONS)}{hint}")
