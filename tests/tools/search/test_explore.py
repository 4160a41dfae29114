"""Cheap looks come first, what misses one gets no dearer one, and nothing that was found out is found out twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeinfer.errors import SessionError
from edgeinfer_tools.faults import DataRefused, GateFailed
from edgeinfer_tools.scheme import Scheme
from edgeinfer_tools.search.budget import Budget
from edgeinfer_tools.search.journal import Journal
from edgeinfer_tools.search.pareto import decide
from edgeinfer_tools.sensitivity import Sensitivity
from tests.tools.search.bench import MIB, FakeWorkbench, Form, Quiet, refused, run

FLOAT = Form(1.0, 16, 40)
DROP = Budget(drop=0.05)


def test_a_form_that_passes_is_looked_at_from_cheap_to_dear() -> None:
    bench = FakeWorkbench({"fp32": FLOAT, "static": Form(0.97)})
    explored = run(bench, DROP)
    assert bench.looks == ["make fp32", "all fp32", "time fp32", "part fp32",
                           "make static", "part static", "all static", "time static"]  # fmt: skip
    assert [row.outcome for row in explored.rows] == ["measured", "measured"]


def test_the_whole_evaluation_is_not_run_when_the_first_samples_settle_it() -> None:
    bench = FakeWorkbench({"fp32": FLOAT, "static": Form(0.5)})
    row = run(bench, DROP).row("static")
    assert row.outcome == "misses quality"
    assert "on the first look, 10 requests" in row.reason
    assert "all static" not in bench.looks


def test_a_close_miss_on_the_first_samples_settles_nothing() -> None:
    bench = FakeWorkbench({"fp32": FLOAT, "static": Form(0.97, first_look=0.85)})
    assert run(bench, DROP).row("static").outcome == "measured"


def test_the_latency_of_what_misses_quality_is_not_measured() -> None:
    bench = FakeWorkbench({"fp32": FLOAT, "w8": Form(0.92, first_look=0.95)})
    row = run(bench, DROP).row("w8")
    assert (row.outcome, row.reason) == ("misses quality", "quality drops by 0.0800, 0.05 is allowed (60% over)")
    assert "time w8" not in bench.looks


def test_what_is_too_large_is_not_even_evaluated_unless_nothing_else_is_left() -> None:
    forms = {"fp32": FLOAT, "fp16": Form(1.0, 8), "w8": Form(0.99, 4)}
    bench = FakeWorkbench(forms)
    explored = run(bench, Budget(size_bytes=5 * MIB))
    assert explored.row("fp16").outcome == "over size"
    assert "part fp16" not in bench.looks
    bench = FakeWorkbench(forms)
    explored = run(bench, Budget(size_bytes=1 * MIB))
    assert explored.row("w8").outcome == explored.row("fp16").outcome == "measured"
    assert decide(explored.points, Budget(size_bytes=1 * MIB), keep=3).winner.name == "w8"


def test_what_only_loses_more_than_a_form_that_missed_is_not_made() -> None:
    bench = FakeWorkbench({"fp32": FLOAT, "w8": Form(0.5), "w4": Form(0.4)})
    row = run(bench, DROP).row("w4")
    assert (row.outcome, "make w4" in bench.looks) == ("coarser", False)
    assert "w8 already misses" in row.reason


def test_equal_bytes_are_looked_at_once() -> None:
    bench = FakeWorkbench({"fp32": FLOAT, "static": Form(0.99, digest="x"), "entropy": Form(0.99, digest="x")})
    assert run(bench, DROP).row("entropy").outcome == "same"
    assert "part entropy" not in bench.looks


def test_a_form_that_cannot_be_made_does_not_stop_the_others() -> None:
    bench = FakeWorkbench({"fp32": FLOAT, "static": Form(fault=refused("no kernel")), "w8": Form(0.99)})
    explored = run(bench, DROP)
    assert (explored.row("static").outcome, explored.row("static").reason) == ("refused", "load_failed: no kernel")
    assert explored.row("w8").outcome == "measured"


def test_unusable_data_stop_the_search() -> None:
    with pytest.raises(DataRefused):
        run(FakeWorkbench({"fp32": FLOAT, "static": Form(fault=DataRefused("constant 0"))}), DROP)


def test_a_float_model_that_misses_the_gates_stops_the_search() -> None:
    with pytest.raises(GateFailed, match=r"the float model itself misses the bar: label_agreement is 0\.8000"):
        run(FakeWorkbench({"fp32": Form(0.8)}), DROP)


# Time


def test_no_look_begins_that_would_end_after_the_limit() -> None:
    names = ["fp32", "static", "entropy", "dynamic", "w8", "fp16"]
    bench = FakeWorkbench({name: Form(0.99) for name in names})
    explored = run(bench, DROP, seconds=160)  # each of them takes 40 s
    assert explored.out_of_time
    assert bench.clock.now_ns() <= 160 * 10**9
    assert [row.outcome for row in explored.rows] == ["measured"] * 3 + ["not tried"] * 3


def test_the_float_model_is_looked_at_however_short_the_time() -> None:
    explored = run(FakeWorkbench({"fp32": FLOAT, "static": Form(0.99)}), DROP, seconds=0)
    assert explored.row("fp32").outcome == "measured"
    assert explored.row("static").outcome == "not tried"


def test_progress_says_what_how_many_and_how_long() -> None:
    progress = Quiet()
    run(FakeWorkbench({"fp32": FLOAT, "static": Form(0.99), "w8": Form(0.99)}), DROP, progress=progress)
    assert progress.lines[0] == ("making fp32", 1, 3, None)
    assert progress.lines[-1][:3] == ("measuring w8", 3, 3)
    assert progress.lines[-1][3] == pytest.approx(35)  # the mean of 30 and 40 s, for the last one
    assert [row.candidate.name for row in progress.rows] == ["fp32", "static", "w8"]


# Resuming


def test_after_ctrl_c_only_what_is_not_known_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "search.jsonl"
    forms = {"fp32": FLOAT, "static": Form(0.99), "w8": Form(0.99)}
    progress = Quiet()
    with pytest.raises(KeyboardInterrupt):
        run(FakeWorkbench(forms, stop_at="all w8"), DROP, journal=Journal(path), progress=progress)
    assert progress.ended  # the terminal is free again
    bench = FakeWorkbench(forms)
    explored = run(bench, DROP, journal=Journal(path))
    assert bench.looks == ["all w8", "time w8"]
    assert [row.known for row in explored.rows] == [True, True, False]
    assert run(FakeWorkbench(forms), DROP).points == explored.points


def test_a_torn_line_costs_one_look_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "search.jsonl"
    forms = {"fp32": FLOAT, "static": Form(0.99)}
    run(FakeWorkbench(forms), DROP, journal=Journal(path))
    path.write_bytes(path.read_bytes()[:-30])
    bench = FakeWorkbench(forms)
    run(bench, DROP, journal=Journal(path))
    assert bench.looks == []  # what was torn off was only how long it took
    assert run(FakeWorkbench(forms), DROP, journal=Journal(path)).row("static").known


def test_what_is_known_costs_no_time(tmp_path: Path) -> None:
    forms = {name: Form(0.99) for name in ("fp32", "static", "w8")}
    run(FakeWorkbench(forms), DROP, journal=Journal(tmp_path / "j"))
    explored = run(FakeWorkbench(forms), DROP, journal=Journal(tmp_path / "j"), seconds=0)
    assert not explored.out_of_time
    assert len(explored.points) == 3


def test_another_machines_latency_is_measured_again_and_nothing_else(tmp_path: Path) -> None:
    forms = {"fp32": FLOAT, "static": Form(0.99)}
    run(FakeWorkbench(forms), DROP, journal=Journal(tmp_path / "j"))
    bench = FakeWorkbench(forms, where="board")
    run(bench, DROP, journal=Journal(tmp_path / "j"))
    assert bench.looks == ["time fp32", "time static"]


def test_what_one_board_refuses_another_may_take(tmp_path: Path) -> None:
    old = {"fp32": FLOAT, "w8": Form(0.99, unmeasurable=refused("no kernel in 1.20"))}
    first = run(FakeWorkbench(old, where="old board"), DROP, journal=Journal(tmp_path / "j"))
    assert first.row("w8").outcome == "refused"
    new = FakeWorkbench({"fp32": FLOAT, "w8": Form(0.99)}, where="new board")
    assert run(new, DROP, journal=Journal(tmp_path / "j")).row("w8").outcome == "measured"


def test_a_refusal_is_remembered_unless_it_may_pass(tmp_path: Path) -> None:
    for fault, looks in ((refused("no kernel"), 0), (SessionError("timeout", "not loaded in 300 s"), 1)):
        forms = {"fp32": FLOAT, "static": Form(fault=fault)}
        path = tmp_path / f"{looks}.jsonl"
        run(FakeWorkbench(forms), DROP, journal=Journal(path))
        bench = FakeWorkbench(forms)
        assert run(bench, DROP, journal=Journal(path)).row("static").outcome == "refused"
        assert len(bench.looks) == looks


def test_another_budget_asks_the_same_facts_anew(tmp_path: Path) -> None:
    forms = {"fp32": FLOAT, "w8": Form(0.96)}
    assert run(FakeWorkbench(forms), Budget(drop=0.01), journal=Journal(tmp_path / "j")).row("w8").point is None
    bench = FakeWorkbench(forms)
    assert run(bench, Budget(drop=0.05), journal=Journal(tmp_path / "j")).row("w8").outcome == "measured"
    assert bench.looks == ["time w8"]


# Sensitivity


def groups(count: int) -> list[Sensitivity]:
    return [Sensitivity((f"n{index:02}",), 1.0 / (index + 1)) for index in range(count)]


def test_the_most_sensitive_nodes_stay_float_as_few_as_the_bar_allows() -> None:
    def kept(scheme: Scheme) -> Form:
        return Form(0.8 + 0.05 * len(scheme.exclude), 4, 10 + len(scheme.exclude))

    bench = FakeWorkbench({"fp32": FLOAT, "static": Form(0.8, first_look=0.9)}, ranking=groups(8), kept=kept)
    explored = run(bench, DROP)
    assert explored.row("static").outcome == "misses quality"
    best = decide(explored.points, DROP, keep=1).winner
    assert best.name == "static-kept3"
    assert best.quality == pytest.approx(0.95)


def test_no_ranking_for_a_form_that_would_not_be_faster() -> None:
    bench = FakeWorkbench({"fp32": Form(1.0, 16, 9), "static": Form(0.5, 4, 10)}, ranking=groups(8))
    explored = run(bench, DROP)
    assert "rank static" not in bench.looks
    assert "no faster than another form (9.00 ms)" in explored.notes[0]


def test_a_ranking_ends_with_the_time() -> None:
    bench = FakeWorkbench({"fp32": FLOAT, "static": Form(0.8, first_look=0.9)}, ranking=groups(24))
    explored = run(bench, DROP, seconds=150)
    assert explored.out_of_time
    assert 0 < bench.looks.count("rank static") < 24
    assert bench.clock.now_ns() <= 160 * 10**9
