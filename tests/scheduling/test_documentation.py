"""The figures in docs/scheduling.md are those that the code computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeinfer.request import Refusal
from edgeinfer.scheduling.admission import Admission, admit
from edgeinfer.scheduling.forecast import forecast
from edgeinfer.scheduling.pacing import UNPACED
from tests.scheduling.jobs import MS, NOW_NS, job, load, running

TEXT = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text(encoding="utf-8")


def test_the_worked_example_is_what_happens() -> None:
    frame, app = job(1, 60, 20, p99_ms=26, firm=False), job(2, 82, 30, p99_ms=36)
    busy = load(frame, app, runs=(running(10, spread_ms=3),))
    newcomer = job(3, 50, 15, p99_ms=20)
    answer = admit(newcomer, busy, now_ns=NOW_NS)
    assert isinstance(answer, Admission)
    assert answer.victims == (1,)
    for plan in ([frame, app], [newcomer, frame, app], [newcomer, app]):
        assert f"{forecast(plan, busy.machine, NOW_NS)[-1].finish_p99_ns / MS:.1f} ms" in TEXT
    refusal = admit(job(3, 28, 15, p99_ms=20), busy, now_ns=NOW_NS)
    assert isinstance(refusal, Refusal)
    assert refusal.detail in TEXT


@pytest.mark.parametrize(("duty_cycle", "cores"), [(0.2, 1), (0.35, 1), (0.35, 2), (0.7, 2)])
def test_the_table_of_budgets_is_what_the_pace_allows(duty_cycle: float, cores: int) -> None:
    pace = UNPACED.under(duty_cycle=duty_cycle, cores=cores, now_ns=NOW_NS)
    best_ms = 160 / pace.budget.rate
    worst_ms = 160 / (pace.budget.rate - pace.express.rate)
    assert (
        f"| {duty_cycle} | {cores} | {pace.budget.rate * 1000:.0f} | {pace.express.rate * 1000:.0f} "
        f"| {pace.express.capacity / MS:.1f} core-ms | {best_ms:.0f} to {worst_ms:.0f} ms |"
    ) in TEXT
