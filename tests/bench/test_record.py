from __future__ import annotations

from pathlib import Path

import pytest

from edgeinfer_bench.record import Figure, Record, read_records, write_record


@pytest.mark.parametrize(
    ("value", "goal", "better", "verdict"),
    [
        (1.03, 1.03, "lower", "met"),
        (1.0301, 1.03, "lower", "missed"),
        (0.95, 0.95, "higher", "met"),
        (0.9499, 0.95, "higher", "missed"),
        (0.5, None, "lower", "-"),
        (None, 1.0, "lower", "-"),
    ],
)
def test_a_verdict_is_the_goals(value: float | None, goal: float | None, better: str, verdict: str) -> None:
    assert Figure("x", value, "x", goal, better, peer=None).verdict == verdict  # type: ignore[arg-type]


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    figure = Figure("overload.mixed.3x.vs_bound", 0.81, "x", 0.8, "higher", peer="bound", runs=3, note="why")
    record = Record(bench="overload", workload={"traces": {"mixed": "abc"}}, figures=[figure], commit="abc")
    assert write_record(record, tmp_path).name == "overload.json"
    assert read_records(tmp_path) == [record]
