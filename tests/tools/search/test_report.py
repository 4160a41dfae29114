"""The table, the JSON and the picture say the same: winner, ladder, front, and why the others did not win."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree as ET

import pytest

from edgeinfer_tools.search.budget import Budget
from edgeinfer_tools.search.explore import Explored
from edgeinfer_tools.search.pareto import Verdict, decide
from edgeinfer_tools.search.plot import log_marks, svg
from edgeinfer_tools.search.progress import PlainProgress
from edgeinfer_tools.search.report import as_json, as_text, shortfall
from tests.tools.search.bench import MIB, FakeWorkbench, Form, run

FORMS = {"fp32": Form(1.0, 16, 40), "static": Form(0.97, 4, 10), "w8": Form(0.5), "fp16": Form(1.0, 8, 41)}
BUDGET = Budget(p99_us=30_000, drop=0.05)


def searched(budget: Budget) -> tuple[Explored, Verdict]:
    explored = run(FakeWorkbench(FORMS), budget)
    return explored, decide(explored.points, budget, keep=3)


def test_the_table_has_every_candidate_and_a_reason_for_each() -> None:
    text = as_text(*searched(BUDGET), BUDGET, where="here", estimated=True)
    assert "p50 and p99 with 1 thread, estimated" in text
    assert re.search(r"^\* static +0\.9700 +10\.00 +20\.00 +4\.0 MiB +50 MiB  winner$", text, re.MULTILINE)
    assert "p99 is 80.00 ms, the bound is 30 ms (167% over)" in text
    assert re.search(r"w8 +misses quality: label_agreement is 0\.5000, the gate is >= 0\.9", text)
    assert "winner: static, the only form that meets the budget, the fastest" in text


def test_the_json_has_the_same() -> None:
    found = json.loads(json.dumps(as_json(*searched(BUDGET), BUDGET, where="here", estimate_model="words")))
    assert (found["winner"], found["met"], found["ladder"], found["estimated"]) == ("static", True, ["static"], True)
    rows = {item["name"]: item for item in found["candidates"]}
    assert rows["w8"]["outcome"] == "misses quality"
    assert rows["fp32"]["reason"].startswith("p99 is 80.00 ms")
    assert rows["static"]["costs"][0]["threads"] == 1


def test_a_budget_that_cannot_be_met_is_told_in_one_sentence() -> None:
    tight = Budget(p99_us=5_000, size_bytes=3 * MIB)
    explored, verdict = searched(tight)
    sentence = shortfall(verdict)
    assert sentence == (
        "the budget cannot be met: the best candidate, static, misses it: "
        "size is 4.0 MiB, the bound is 3.0 MiB (33% over); p99 is 20.00 ms, the bound is 5 ms (300% over)"
    )
    assert shortfall(verdict, out_of_time=True).startswith("the budget was not met in the time given: the best")
    assert sentence in as_text(explored, verdict, tight, where="here", estimated=False)


@pytest.mark.parametrize("budget", [BUDGET, Budget(size_bytes=5 * MIB), Budget(p99_us=100)])
def test_the_picture_is_sound_and_shows_every_point_inside(budget: Budget) -> None:
    explored, verdict = searched(budget)
    picture = svg(explored.points, verdict, budget, title="a < b & c", estimated=True)
    root = ET.fromstring(picture)
    circles = root.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == len(explored.points)
    assert all(0 < float(item.attrib["cx"]) < 860 and 0 < float(item.attrib["cy"]) < 480 for item in circles)
    assert "a &lt; b &amp; c" in picture


def test_marks_are_round_numbers_between() -> None:
    assert log_marks(3, 40) == [5, 10, 20, 50]


def test_plain_progress_is_a_line_for_each_look_and_candidate() -> None:
    lines: list[str] = []
    progress = PlainProgress(lines.append)
    progress.looking("making static", 3, 14, 42)
    progress.looking("making w8", 4, 14, 500)
    for row in searched(BUDGET)[0].rows[:2]:
        progress.found(row)
    assert lines == [
        "[3/14]    making static, about 42 s left",
        "[4/14]    making w8, about 8 min left",
        "          fp32: quality 1.0000, p99 80.00 ms, 16 MiB, peak 50 MiB",
        "          static: quality 0.9700, p99 20.00 ms, 4.0 MiB, peak 50 MiB",
    ]
