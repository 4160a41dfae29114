"""Each check of the demo can fail: a run without what it looks for is refused, by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeinfer_demo.summary import FRAMES, KINDS, compose
from edgeinfer_demo.verdict import Evidence, Happening, PhaseRecord, judge
from edgeinfer_demo.world import KEPT


def origin(name: str = "camera", **changes: Any) -> dict[str, Any]:
    counts = {
        "origin": name, "received": 10, "in_flight": 0, "ok": 8, "late": 0, "rejected": 2, "cancelled": 0,
        "expired": 0, "failed": 0, "reasons": {"rejected.thermal": 2}, "ok_by_placement": {"local": 5, "nearby": 3},
        "p50_ms": {"local": 100.0, "nearby": 120.0}, "p99_ms": {"local": 150.0, "nearby": 190.0},
        "deadline_hit_rate": 0.8, "by_placement": {"local": {"ok": 5}, "nearby": {"ok": 3}, "none": {"rejected": 2}},
    }  # fmt: skip
    return counts | changes


def phase(name: str, *, local: int = 5, nearby: int = 0, ended: int | None = None) -> PhaseRecord:
    total = local + nearby if ended is None else ended
    return PhaseRecord(name, 10.0, {"camera": local}, {"camera": nearby}, {"camera": total})


def events(*kinds: str) -> tuple[Happening, ...]:
    return tuple(Happening(1.5, kind, f"detail of {kind}") for kind in kinds)


GOOD = Evidence(
    phases=(phase("steady"), phase("overload", nearby=3), phase("heat"), phase("outage")),
    events=events("offload-open", "throttle-start", "throttle-end", "offload-close"),
    report={
        "total": origin("total"),
        "origins": [origin()],
        "thermal": {"seconds_by_level": {"nominal": 5.0, "warm": 4.0}, "throttle_episodes": 1},
        "loops": [{"name": "camera", "source_restarts": 0} | dict.fromkeys(FRAMES, 4)],
        "memory": {"ceiling_bytes": 1000, "peak_reserved_bytes": 500},
    },
    intent="support_request 0.9427",
    exit_status={"daemon": 0, "nearby": 0, "mosquitto": 0},
    firmware_throttled_s=0.0,
    peak_c=78.0,
)


def failed(evidence: Evidence) -> list[str]:
    return [check.name for check in judge(evidence) if not check.ok]


def test_a_good_run_passes_every_check() -> None:
    assert failed(GOOD) == []


@pytest.mark.parametrize(
    ("evidence", "name"),
    [
        (replace(GOOD, report=GOOD.report | {"total": origin("total", received=11)}), "accounting identity"),
        (replace(GOOD, report=GOOD.report | {"origins": [origin(in_flight=1)]}), "accounting identity"),
        (replace(GOOD, phases=(phase("steady", local=5, ended=10), *GOOD.phases[1:])), "keeps up alone when it can"),
        (replace(GOOD, phases=(GOOD.phases[0], phase("overload"), *GOOD.phases[2:])), "offloads under overload"),
        (
            replace(GOOD, phases=(GOOD.phases[0], phase("overload", local=91, nearby=9), *GOOD.phases[2:])),
            "offloads under overload",
        ),
        (
            replace(
                GOOD,
                phases=(
                    GOOD.phases[0],
                    PhaseRecord("overload", 10.0, {"camera": 50}, {"other": 40}, {"camera": 50}),
                    *GOOD.phases[2:],
                ),
            ),
            "offloads under overload",
        ),
        (replace(GOOD, events=GOOD.events[1:]), "offloads under overload"),
        (replace(GOOD, events=events("offload-open", "throttle-end")), "reports throttling and its end"),
        (replace(GOOD, events=events("offload-open", "throttle-start")), "reports throttling and its end"),
        (replace(GOOD, firmware_throttled_s=0.2), "the firmware never had to throttle"),
        (
            replace(GOOD, phases=(*GOOD.phases[:3], phase("outage", local=0, ended=4))),
            "goes on locally during the outage",
        ),
        (replace(GOOD, intent="other 0.4013"), "answers a local app"),
        (replace(GOOD, exit_status={"daemon": None, "nearby": 0}), "drains and exits cleanly"),
    ],
)
def test_a_broken_promise_is_named(evidence: Evidence, name: str) -> None:
    assert failed(evidence) == [name]


def test_one_silent_loop_during_the_outage_is_enough_to_fail() -> None:
    outage = PhaseRecord("outage", 10.0, {"camera": 0, "microphone": 300}, {}, {"camera": 40, "microphone": 300})
    checks = judge(replace(GOOD, phases=(*GOOD.phases[:3], outage)))
    assert [check.detail for check in checks if not check.ok] == [
        "300 local answers in 10 s without a broker; none from camera"
    ]


def test_the_report_holds_every_figure_that_was_promised() -> None:
    report = compose(GOOD, 700, judge(GOOD), board="demo-board", seconds=12.0)
    assert report["loops"]["camera"]["placements"]["nearby"] == {
        "outcomes": {"ok": 3},
        "p50_ms": 120.0,
        "p99_ms": 190.0,
    }
    assert report["loops"]["camera"]["deadline_hit_rate"] == 0.8
    assert report["thermal"] == {
        "seconds_by_level": {"nominal": 5.0, "warm": 4.0}, "peak_c": 78.0, "throttle_episodes": 1,
        "firmware_throttled_s": 0.0,
    }  # fmt: skip
    assert report["memory"] == {"budget_bytes": 1000, "peak_reserved_bytes": 500, "peak_pss_bytes": 700}
    assert report["offloaded_share"] == 3 / 8
    assert report["identity"]["holds"]
    assert report["events"][1] == {"at_s": 1.5, "kind": "throttle-start", "detail": "detail of throttle-start"}
    assert report["frames"] == {"camera": dict.fromkeys(FRAMES, 4)}


def test_some_hiccups_of_a_busy_machine_are_no_broken_promise() -> None:
    assert failed(replace(GOOD, phases=(phase("steady", local=90, ended=100), *GOOD.phases[1:]))) == []


def keys(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(keys, value))
    if not isinstance(value, dict):
        return set()
    free = {"camera", "local", "nearby", "none", "daemon", "mosquitto", "nominal", "warm", "rejected.thermal", *KINDS}
    return (value.keys() - free).union(*map(keys, value.values()))


def test_every_key_of_the_report_is_described() -> None:
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text().partition("## The demo's report")[2]
    told = set(re.findall(r"`([^`\n]+)`", page))
    assert keys(compose(GOOD, 700, judge(GOOD), board="demo-board", seconds=12.0)) <= told
    assert set(KEPT) <= told
    assert {check.name for check in judge(GOOD)} <= told
