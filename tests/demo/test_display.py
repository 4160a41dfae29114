"""What people see is whole, also on a terminal of 80 columns."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from edgeinfer_demo.explain import ON_PURPOSE, explain
from edgeinfer_demo.live import Display, View
from edgeinfer_demo.scenario import PHASES
from edgeinfer_demo.summary import compose
from edgeinfer_demo.tables import Column, lay_out
from edgeinfer_demo.verdict import judge
from tests.demo.test_verdict import GOOD, origin

LARGE = {
    "received": 123456, "ok": 65432, "rejected": 54321, "expired": 4321, "failed": 321, "late": 21, "cancelled": 12,
    "ok_by_placement": {"local": 65432, "nearby": 4321}, "p50_ms": {"local": 1234.5, "nearby": 123.4},
    "p99_ms": {"local": 12345.6, "nearby": 234.5}, "deadline_hit_rate": 0.987,
    "by_placement": {
        "local": {"ok": 65432, "late": 21, "expired": 4321, "failed": 321},
        "nearby": {"ok": 4321}, "none": {"rejected": 54321, "cancelled": 12},
    },
}  # fmt: skip
REPORT = GOOD.report | {
    "origins": [origin(name, **LARGE) for name in ("camera", "microphone", "support-intent")],
    "memory": {"ceiling_bytes": 512 << 20, "reserved_bytes": 180 << 20, "peak_reserved_bytes": 200 << 20},
}
STATE = {"thermal": {"level": "critical", "duty_cycle": 0.45}, "offload": {"open": True}}


def view(report: dict[str, Any] = REPORT) -> View:
    return View(
        phase=PHASES[1], left_s=123.0, board_c=81.2, report=report, state=STATE, broker_up=False,
        recent=[f"refusal-burst: {number} of 40 requests refused in 5 s (deadline_unreachable 12)" for number in range(8)],
    )  # fmt: skip


def shown(width: int, what: str) -> str:
    console = Console(width=width, height=40, file=io.StringIO(), force_terminal=True, color_system=None)
    display = Display(console)
    if what == "summary":
        evidence = GOOD
        composed = compose(evidence, 700 << 20, judge(evidence), board="demo-board", seconds=145.0)
        composed["loops"] = compose_loops()
        display.summary(composed, judge(evidence))
    else:
        with display:
            display.show(view())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def compose_loops() -> dict[str, Any]:
    return dict(compose(replace(GOOD, report=REPORT), 0, [], board="b", seconds=1.0)["loops"])


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("what", ["view", "summary"])
def test_no_cell_is_cut(width: int, what: str) -> None:
    text = shown(width, what)
    assert "…" not in text
    for figure in ("support-intent", "65432", "54321", "4321", "12346", "98.7%"):
        assert figure in text, figure


def test_a_small_terminal_shows_no_column_of_zeros() -> None:
    columns = [Column("loop", "loop", ["a", "b"], name=True), Column("failed", "fail", ["0", "0"]),
               Column("late", "late", ["0", "3"])]  # fmt: skip
    assert [column.header for column in lay_out(columns, width=80).columns] == ["loop", "late"]
    assert [column.header for column in lay_out(columns, width=120).columns] == ["loop", "failed", "late"]


def test_the_summary_says_why_so_much_was_not_answered() -> None:
    loops = {
        "camera": {"reasons": {"rejected.superseded": 9, "expired.queued": 4, "failed.link": 2, "rejected.cost": 1}},
        "microphone": {"reasons": {}},
    }
    lines = list(explain(loops, {"camera": {"taken": 90, "skipped": 7, "stale": 0}}))
    assert lines == [
        (
            "camera: 9 rejected.superseded (a newer frame took its place), "
            "4 expired.queued (its time was up while it waited), 2 failed.link, 1 for other reasons; "
            "frames never asked about: 7 skipped"
        ),
        "microphone: every request was answered in time",
        ON_PURPOSE,
    ]
    assert all(phase.name in ON_PURPOSE for phase in PHASES[1:4]), "the phases that ask too much"
    assert "phases overload" in shown(80, "summary")


def test_a_run_without_trouble_needs_no_excuse() -> None:
    assert list(explain({"camera": {"reasons": {}}}, {})) == ["camera: every request was answered in time"]
