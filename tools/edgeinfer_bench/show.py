"""Print figures as tables: id, value, goal, verdict."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from edgeinfer_bench.record import Record

_STYLE = {"met": "green", "missed": "red", "-": "dim"}
_WIDTH = 160
"""Where the output is no terminal: wide enough for ids and notes."""


def show(records: list[Record]) -> None:
    """Print one table per record."""
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    if not records:
        console.print("nothing has been measured yet: run `make bench`")
    for record in records:
        table = Table(title=f"{record.bench}  (commit {record.commit}, {record.machine['cpu']})", title_justify="left")
        for column in ("figure", "value", "unit", "goal", "verdict", "beside", "runs", "note"):
            number = column in {"value", "goal", "runs"}
            table.add_column(column, justify="right" if number else "left", no_wrap=number or column == "figure")
        for figure in record.figures:
            sign = "≤" if figure.better == "lower" else "≥"
            table.add_row(
                figure.id,
                "not measured" if figure.value is None else f"{figure.value:.4g}",
                figure.unit,
                "" if figure.goal is None else f"{sign} {figure.goal:g}",
                f"[{_STYLE[figure.verdict]}]{figure.verdict}[/]",
                figure.peer or "",
                str(figure.runs),
                figure.note,
            )
        console.print(table)
