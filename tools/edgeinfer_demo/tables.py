"""Lay out tables for the width there is: no cell is ever cut.

Below `NARROW` columns heads are short, and counts that are zero in every row are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

NARROW = 110
_NOTHING = frozenset({"0", "-", ""})


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its head, a shorter one, and its cells."""

    head: str
    short: str
    cells: Sequence[str]
    name: bool = False
    """Holds words, not a number: aligned to the left, never left out, and folded rather than cut."""


def lay_out(columns: Sequence[Column], *, width: int, title: str = "") -> Table:
    """Return the table for a terminal of that width."""
    narrow = width < NARROW
    if narrow:
        columns = [column for column in columns if column.name or not _NOTHING.issuperset(column.cells)]
    table = Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD if narrow else box.HEAVY_HEAD,
        padding=0 if narrow else (0, 1),
        show_edge=not narrow,
    )
    for column in columns:
        table.add_column(
            column.short if narrow else column.head,
            justify="left" if column.name else "right",
            no_wrap=not column.name,
            overflow="fold",
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table
