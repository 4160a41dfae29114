"""Load tests against a real gateway: planned times, honest latencies, every ending counted."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.artifact import manifest
from edgeinfer.cli import main
from edgeinfer.cli.arguments import MAX_DEADLINE_MS
from edgeinfer.client import Rejected
from edgeinfer.client.load import Call, Load, arrivals, choose_inputs, describe, run_load, summarize
from edgeinfer.client.values import Media, Tensor
from edgeinfer.errors import LinkError
from edgeinfer.request import Ending, InferRequest, Reason, Refusal
from tests.gateway.serving import ScriptedSubmit, run_model, serving_in_thread

MS = 1_000_000
TEXT = {"text": Media(b"charged", "text/plain")}


def load(**changes: Any) -> Load:
    return Load(**{"model": "support-intent", "inputs": TEXT, "seconds": 0.3, **changes})


@pytest.fixture
def submit() -> ScriptedSubmit:
    return ScriptedSubmit()


@pytest.fixture
def socket_path(submit: ScriptedSubmit) -> Iterator[Path]:
    with serving_in_thread(submit) as (_, path):
        yield path


# The plan


def test_the_plan_has_the_rate_and_is_the_same_again() -> None:
    plan = list(arrivals(load(rate_hz=1000.0, seconds=20.0, seed=3)))
    assert plan == list(arrivals(load(rate_hz=1000.0, seconds=20.0, seed=3)))
    assert plan != list(arrivals(load(rate_hz=1000.0, seconds=20.0, seed=4)))
    assert len(plan) == pytest.approx(20_000, rel=0.03)
    gaps = [after - before for before, after in itertools.pairwise(plan)]
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05), "a Poisson process"
    even = list(arrivals(load(rate_hz=100.0, seconds=1.0, evenly=True)))
    assert len(even) in {99, 100}
    assert {round((after - before) / MS) for before, after in itertools.pairwise(even)} == {10}


def test_inputs_are_a_file_a_text_or_zeros(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"jpeg")
    one: list[dict[str, Any]] = [{"name": "x", "datatype": "BYTES", "shape": [-1]}]
    assert choose_inputs(one, "m", file=tmp_path / "a.jpg") == {"x": Media(b"jpeg", "image/jpeg")}
    assert choose_inputs(one, "m", text="a") == {"x": Media(b"a", "text/plain; charset=utf-8")}
    assert choose_inputs(one, "m") == {"x": Tensor("BYTES", [1], bytes(4))}
    two: list[dict[str, Any]] = [
        {"name": "a", "datatype": "FP32", "shape": [2, -1]},
        {"name": "b", "datatype": "INT64", "shape": []},
    ]
    assert choose_inputs(two, "m") == {"a": Tensor("FP32", [2, 1], bytes(8)), "b": Tensor("INT64", [], bytes(8))}
    with pytest.raises(Rejected, match=r"FP32 \[1000000, 1000000\] has .* at most 64 MiB are sent"):
        choose_inputs([{"name": "x", "datatype": "FP32", "shape": [10**6, 10**6]}], "m")
    with pytest.raises(Rejected, match="a, b; name the input"):
        choose_inputs(two, "m", text="a")


# The load


@pytest.mark.slow
def test_a_closed_loop_asks_again_as_soon_as_it_is_answered(submit: ScriptedSubmit, socket_path: Path) -> None:
    submit.delay_s = 0.02
    asked = load(concurrency=3)
    report = summarize(asked, run_load(asked, socket_path))
    assert set(report["outcomes"]) == {"ok"}
    assert 20 <= report["requests"] <= 48  # 3 places, 300 ms, 20 ms and a little
    assert len(submit.tickets) == report["requests"]
    assert report["offered_per_s"] is None
    assert report["latency_ms"]["p50"] >= 20
    assert report["phases_ms"]["transport"]["p50"] < report["latency_ms"]["p50"]


@pytest.mark.slow
def test_a_stall_counts_for_everybody_who_was_to_be_served_meanwhile(submit: ScriptedSubmit, socket_path: Path) -> None:
    """One connection, 100 requests a second, and one answer that takes 200 ms: twenty callers waited for it."""
    first = threading.Event()

    def stalls_once(request: InferRequest) -> Ending:
        if not first.is_set():
            first.set()
            time.sleep(0.2)
        return run_model(request)

    submit.script = stalls_once
    asked = load(rate_hz=100.0, evenly=True, seconds=0.5)
    calls = run_load(asked, socket_path)
    assert len(calls) in {49, 50}
    slow = [call for call in calls if call.latency_ns > 50 * MS]
    assert len(slow) >= 14, "only the one that stalled would be slow, were the plan put off with it"
    assert max(call.phases_ns["unsent"] for call in slow) > 100 * MS
    assert summarize(asked, calls)["latency_ms"]["p90"] > 100


@pytest.mark.slow
def test_what_could_not_be_sent_in_time_is_told(submit: ScriptedSubmit, socket_path: Path) -> None:
    submit.delay_s = 0.1
    asked = load(rate_hz=200.0, evenly=True, deadline_ms=150.0)
    report = summarize(asked, run_load(asked, socket_path))
    assert report["outcomes"]["unsent"] > 40
    assert report["requests"] in {59, 60}
    assert report["offered_per_s"] == pytest.approx(200, rel=0.03)
    assert report["answered_per_s"] < 12
    assert report["in_time"] < report["outcomes"]["ok"], "two of three were sent after their planned time, too late"
    assert sum(report["outcomes"].values()) == report["requests"]


@pytest.mark.slow
def test_refusals_are_counted_by_reason(submit: ScriptedSubmit, socket_path: Path) -> None:
    turn = itertools.count()
    submit.script = lambda request: Refusal(Reason.QUEUE_FULL, "full") if next(turn) % 2 else run_model(request)
    asked = load(concurrency=1, seconds=0.2)
    report = summarize(asked, run_load(asked, socket_path))
    assert set(report["outcomes"]) == {"ok", "rejected(queue_full)"}
    assert report["in_time"] == report["outcomes"]["ok"]
    assert "rejected(queue_full)" in describe(report)


def test_no_daemon_and_no_model_are_told_before_anything_is_sent(
    tmp_path: Path, submit: ScriptedSubmit, socket_path: Path
) -> None:
    with pytest.raises(LinkError, match="no edgeinfer on"):
        run_load(load(), tmp_path / "none")
    with pytest.raises(Rejected, match="model_unavailable"):
        run_load(load(model="nobody"), socket_path)
    assert submit.tickets == []


@pytest.mark.slow
def test_the_command_line_prints_a_report(
    submit: ScriptedSubmit, socket_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["bench", "support-intent", "--text", "charged", "--seconds", "0.2", "--socket", str(socket_path)]
    assert main([*common, "--json", "--rate", "50", "--concurrency", "2", "--deadline-ms", "500"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["loop"], report["arrivals"]) == ("support-intent", "open", "poisson")
    assert report["in_time"] == report["requests"]
    assert main(common) == 0
    printed = capsys.readouterr().out
    assert "support-intent: closed loop, 1 connections" in printed
    assert all(word in printed for word in ("p50", "p90", "p99", "total", "transport", "in time      100.00%"))
    submit.script = lambda _: Refusal(Reason.MEMORY, "none left")
    assert main(common) == 75
    assert "rejected(memory)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rate", "1e300"], "'1e300' is more than 100,000 a second"),
        (["--rate", "1e7", "--seconds", "2"], "more than 100,000 a second"),
        (["--seconds", "1e300"], "more than 86,400 s"),
        (["--deadline-ms", "1e300"], "more than 600,000 ms"),
        (["--deadline-ms", "nan"], "not a positive number"),
        (["--rate", "1e5", "--seconds", "11"], "plans 1,100,000 requests, at most 1,000,000 are kept"),
    ],
)
def test_what_would_never_end_is_refused_as_usage(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    try:
        status = main(["bench", "m", "--socket", str(tmp_path / "none"), *arguments])
    except SystemExit as usage:
        status = int(usage.code or 0)
    assert (status, told in capsys.readouterr().err) == (2, True)


def test_the_longest_deadline_is_the_daemons() -> None:
    assert MAX_DEADLINE_MS == manifest.MAX_DEADLINE_MS


def test_a_file_that_never_ends_is_not_sent(
    socket_path: Path, submit: ScriptedSubmit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    for command in ("bench", "infer"):
        for path in ("/dev/zero", tmp_path / "pipe", tmp_path / "huge"):
            assert main([command, "support-intent", "--file", str(path), "--socket", str(socket_path)]) == 66
            assert f"{path} cannot be read: it " in capsys.readouterr().err
    assert main(["infer", "support-intent", "--inputs", "@/dev/zero", "--socket", str(socket_path)]) == 66
    assert submit.tickets == []


@pytest.mark.slow
def test_more_than_this_machine_can_send_ends_on_time_and_says_how_many_were_sent(
    socket_path: Path, submit: ScriptedSubmit
) -> None:
    asked = load(rate_hz=100_000.0, seconds=0.5, concurrency=2)
    began = time.monotonic()
    report = summarize(asked, run_load(asked, socket_path))
    assert time.monotonic() - began < 10
    assert report["requests"] == pytest.approx(50_000, rel=0.05)
    assert len(submit.tickets) == report["sent"] == report["requests"] - report["outcomes"]["unsent"] < 40_000
    assert f"{report['sent']} of {report['requests']} planned" in describe(report)


# The report


def test_without_a_deadline_the_models_own_is_counted_by_and_named() -> None:
    calls = [Call(0, 0, ended_ms * MS, "ok") for ended_ms in (10, 20, 30)]
    report = summarize(load(model_deadline_ms=20.0), calls)
    assert (report["in_time"], report["deadline_ms"], report["deadline_from"]) == (2, 20.0, "model")
    assert "(2 of 3) within 20 ms, the model's deadline" in describe(report)
    report = summarize(load(model_deadline_ms=20.0, deadline_ms=30.0), calls)
    assert (report["in_time"], report["deadline_from"]) == (3, "option")
    assert "the model's" not in describe(report)


@given(st.lists(st.integers(0, 10**10), min_size=1, max_size=200))
def test_percentiles_are_latencies_that_were_seen(latencies_ns: list[int]) -> None:
    calls = [Call(0, 0, latency_ns, "ok") for latency_ns in latencies_ns]
    spread = summarize(load(), calls)["latency_ms"]
    seen = {round(latency_ns / MS, 3) for latency_ns in latencies_ns}
    assert set(spread.values()) <= seen
    assert spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["max"] == max(seen)


def test_nothing_at_all_is_a_report_too() -> None:
    report = summarize(load(), [])
    assert (report["requests"], report["in_time_share"], report["latency_ms"]) == (0, None, None)
    assert "answered     0/s" in describe(report)
