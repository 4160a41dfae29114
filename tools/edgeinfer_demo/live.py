"""Show the run to people: a live view on a terminal, one line a second elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from edgeinfer_demo.scenario import Phase
from edgeinfer_demo.verdict import Check

_LEVEL_STYLE = {"nominal": "green", "warm": "yellow", "hot": "dark_orange", "critical": "red"}


@dataclass(frozen=True, slots=True)
class View:
    """What is shown at one moment."""

    phase: Phase
    left_s: float
    """Of the whole run."""
    board_c: float
    report: dict[str, Any]
    state: dict[str, Any]
    broker_up: bool
    recent: Sequence[str]


class Display:
    """Draws views; a context manager."""

    def __init__(self) -> None:
        probe = Console()
        self.console = probe if probe.is_terminal else Console(width=120)
        self._live = Live(console=self.console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Print one line that stays."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def show(self, view: View) -> None:
        """Draw the moment, or print it as a line where there is no terminal."""
        if self.console.is_terminal:
            self._live.update(_panel(view))
        else:
            self.say(_line(view))

    def summary(self, report: dict[str, Any], checks: Sequence[Check]) -> None:
        """Print what the run came to."""
        self.console.print(_loops(report))
        thermal, memory = report["thermal"], report["memory"]
        seconds = ", ".join(f"{level} {value:.0f} s" for level, value in thermal["seconds_by_level"].items())
        firmware = f"firmware throttled {thermal['firmware_throttled_s']:.1f} s"
        self.say(f"heat      peak {thermal['peak_c']:.1f} C; {seconds}; {firmware}")
        reserved, measured = _mib(memory["peak_reserved_bytes"]), _mib(memory["peak_pss_bytes"])
        self.say(
            f"memory    budget {_mib(memory['budget_bytes'])}, reserved at most {reserved}, PSS at most {measured}"
        )
        self.say(f"offload   {report['offloaded_share']:.1%} of the answers came from next door")
        identity = report["identity"]
        ended = " + ".join(f"{value} {kind}" for kind, value in identity["ended"].items())
        self.say(f"identity  {identity['received']} received = {identity['in_flight']} in flight + {ended}")
        for check in checks:
            mark = "[green]ok[/]  " if check.ok else "[bold red]FAIL[/]"
            self.console.print(f"{mark} {check.name}: {check.detail}", highlight=False)


def _panel(view: View) -> Panel:
    thermal = view.state["thermal"]
    level = thermal["level"]
    head = Table.grid(padding=(0, 3))
    head.add_row(
        Text(f"{view.phase.name}: {view.phase.note}", style="bold"),
        Text(f"{view.left_s:.0f} s left"),
    )
    board = Table.grid(padding=(0, 3))
    board.add_row(
        Text(f"board {view.board_c:.1f} C"),
        Text(level, style=_LEVEL_STYLE.get(level, "")),
        Text(f"duty cycle {thermal['duty_cycle']:.0%}"),
        Text(f"ambient {view.phase.ambient_c:.0f} C"),
        Text("broker up" if view.broker_up else "broker DOWN", style="green" if view.broker_up else "bold red"),
        Text("offloading" if view.state["offload"]["open"] else "local", style="cyan"),
    )
    memory = view.report["memory"]
    used = Text(f"memory {_mib(memory['reserved_bytes'])} of {_mib(memory['ceiling_bytes'])} reserved")
    return Panel(
        Group(head, board, used, _origins(view.report), Text("\n".join(view.recent), style="dim")),
        title="edgeinfer demo",
    )


def _origins(report: dict[str, Any]) -> Table:
    table = Table(expand=True)
    for column in (
        "loop",
        "received",
        "local",
        "nearby",
        "rejected",
        "expired",
        "failed",
        "p50 / p99 ms local",
        "in time",
    ):
        table.add_column(column, justify="left" if column == "loop" else "right")
    for counts in report["origins"]:
        placed, p50, p99 = counts["ok_by_placement"], counts["p50_ms"], counts["p99_ms"]
        table.add_row(
            counts["origin"], str(counts["received"]), str(placed.get("local", 0)), str(placed.get("nearby", 0)),
            str(counts["rejected"]), str(counts["expired"]), str(counts["failed"]),
            f"{_ms(p50.get('local'))} / {_ms(p99.get('local'))}", _percent(counts["deadline_hit_rate"]),
        )  # fmt: skip
    return table


def _line(view: View) -> str:
    thermal = view.state["thermal"]
    loops = "  ".join(
        f"{counts['origin']}: {counts['ok_by_placement'].get('local', 0)} local "
        f"{counts['ok_by_placement'].get('nearby', 0)} nearby {counts['rejected']} rejected"
        for counts in view.report["origins"]
    )
    broker = "" if view.broker_up else "  BROKER DOWN"
    return f"{view.left_s:4.0f} s  {view.phase.name:<9} {view.board_c:5.1f} C {thermal['level']:<8} {loops}{broker}"


def _loops(report: dict[str, Any]) -> Table:
    table = Table(title="what became of every request", title_justify="left")
    for column in (
        "loop",
        "placement",
        "ok",
        "late",
        "rejected",
        "cancelled",
        "expired",
        "failed",
        "p50 ms",
        "p99 ms",
        "in time",
    ):
        table.add_column(column, justify="left" if column in {"loop", "placement"} else "right")
    for name, loop in report["loops"].items():
        for placement, row in loop["placements"].items():
            table.add_row(
                name, placement, *(str(row["outcomes"].get(kind, 0)) for kind in
                                   ("ok", "late", "rejected", "cancelled", "expired", "failed")),
                _ms(row["p50_ms"]), _ms(row["p99_ms"]),
                _percent(loop["deadline_hit_rate"]) if placement == next(iter(loop["placements"])) else "",
            )  # fmt: skip
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.0f} MiB"
