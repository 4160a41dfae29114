"""Show the run to people: a live view on a terminal, one line a second elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from edgeinfer_demo.explain import explain
from edgeinfer_demo.scenario import Phase
from edgeinfer_demo.tables import NARROW, Column, lay_out
from edgeinfer_demo.verdict import Check

_LEVEL_STYLE = {"nominal": "green", "warm": "yellow", "hot": "dark_orange", "critical": "red"}

_NARROW_RECENT = 4
"""Events that a small terminal shows: their lines wrap there."""
_SHORT = {"ok": "ok", "late": "late", "rejected": "rej", "cancelled": "canc", "expired": "exp", "failed": "fail"}


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

    def __init__(self, console: Console | None = None) -> None:
        probe = console or Console()
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
            self._live.update(_panel(view, self.console.width), refresh=True)
        else:
            self.say(_line(view))

    def summary(self, report: dict[str, Any], checks: Sequence[Check]) -> None:
        """Print what the run came to."""
        self.console.print(_loops(report, self.console.width))
        for line in explain(report["loops"], report["frames"]):
            self.console.print(line, highlight=False, markup=False)
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


def _panel(view: View, width: int) -> Panel:
    thermal = view.state["thermal"]
    level = thermal["level"]
    memory = view.report["memory"]
    head = Text(f"{view.phase.name}: {view.phase.note}", style="bold")
    board = Text("   ").join(
        (
            Text(f"{view.left_s:.0f} s left"),
            Text(f"board {view.board_c:.1f} C"),
            Text(level, style=_LEVEL_STYLE.get(level, "")),
            Text(f"duty cycle {thermal['duty_cycle']:.0%}"),
            Text(f"ambient {view.phase.ambient_c:.0f} C"),
            Text("broker up" if view.broker_up else "broker DOWN", style="green" if view.broker_up else "bold red"),
            Text("offloading" if view.state["offload"]["open"] else "local", style="cyan"),
            Text(f"memory {_mib(memory['reserved_bytes'])} of {_mib(memory['ceiling_bytes'])} reserved"),
        )
    )
    shown = view.recent if width >= NARROW else view.recent[-_NARROW_RECENT:]
    recent = Text("\n".join(shown), style="dim")
    return Panel(Group(head, board, _origins(view.report, width), recent), title="edgeinfer demo")


def _origins(report: dict[str, Any], width: int) -> Table:
    origins = report["origins"]

    def counted(head: str, short: str, count: Callable[[dict[str, Any]], int]) -> Column:
        return Column(head, short, [str(count(counts)) for counts in origins])

    return lay_out(
        [
            Column("loop", "loop", [counts["origin"] for counts in origins], name=True),
            counted("received", "recv", lambda counts: counts["received"]),
            counted("local", "local", lambda counts: counts["ok_by_placement"].get("local", 0)),
            counted("nearby", "near", lambda counts: counts["ok_by_placement"].get("nearby", 0)),
            counted("rejected", "rej", lambda counts: counts["rejected"]),
            counted("expired", "exp", lambda counts: counts["expired"]),
            counted("failed", "fail", lambda counts: counts["failed"]),
            Column("p50 ms local", "p50", [_ms(counts["p50_ms"].get("local")) for counts in origins]),
            Column("p99 ms local", "p99", [_ms(counts["p99_ms"].get("local")) for counts in origins]),
            Column("in time", "in time", [_percent(counts["deadline_hit_rate"]) for counts in origins]),
        ],
        width=width,
    )


def _line(view: View) -> str:
    thermal = view.state["thermal"]
    loops = "  ".join(
        f"{counts['origin']}: {counts['ok_by_placement'].get('local', 0)} local "
        f"{counts['ok_by_placement'].get('nearby', 0)} nearby {counts['rejected']} rejected"
        for counts in view.report["origins"]
    )
    broker = "" if view.broker_up else "  BROKER DOWN"
    return f"{view.left_s:4.0f} s  {view.phase.name:<9} {view.board_c:5.1f} C {thermal['level']:<8} {loops}{broker}"


def _loops(report: dict[str, Any], width: int) -> Table:
    rows = [
        ("" if number else name, placement, row, "" if number else _percent(loop["deadline_hit_rate"]))
        for name, loop in report["loops"].items()
        for number, (placement, row) in enumerate(loop["placements"].items())
    ]
    return lay_out(
        [
            Column("loop", "loop", [name for name, *_ in rows], name=True),
            Column("placement", "where", [placement for _, placement, *_ in rows], name=True),
            *(
                Column(kind, short, [str(row["outcomes"].get(kind, 0)) for _, _, row, _ in rows])
                for kind, short in _SHORT.items()
            ),
            Column("p50 ms", "p50", [_ms(row["p50_ms"]) for _, _, row, _ in rows]),
            Column("p99 ms", "p99", [_ms(row["p99_ms"]) for _, _, row, _ in rows]),
            Column("in time", "in time", [rate for *_, rate in rows]),
        ],
        width=width,
        title="what became of every request",
    )


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.0f} MiB"
