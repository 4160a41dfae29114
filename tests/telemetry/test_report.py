"""Records and the status page: the numbers are those of the accounting, and JSON holds them whatever they are."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from edgeinfer.clock import NS_PER_S
from edgeinfer.execution.ledger import OURSELVES, OUTGROWN, LedgerSnapshot
from edgeinfer.governor.attribution import Cause
from edgeinfer.governor.governor import Outlook
from edgeinfer.metrics import OriginCounts
from edgeinfer.mqtt.envelope import Report, State, decode, encode
from edgeinfer.mqtt.stamp import Stamp
from edgeinfer.request import OutcomeKind, Placement, Reason
from edgeinfer.sensors.state import SensorState
from edgeinfer.telemetry.report import (
    Identity,
    Recent,
    build_report,
    build_state,
    build_status,
    describe_status,
)
from edgeinfer.telemetry.snapshot import GatewayFigures, LoopFigures, OutcomeWindow, Snapshot, origin_figures
from tests.telemetry.world import MODEL, World

STAMP = Stamp(at="2026-05-01T12:00:00.000Z", clock_synced=True, boot="b", mono_ns=1)
IDENTITY = Identity(board="generic-x86", version="0.1.0", started_ns=900 * NS_PER_S)


def report_of(snapshot: Snapshot) -> Report:
    return build_report(snapshot, IDENTITY, STAMP, Recent(0, ()))


def read(record: Report | State) -> dict[str, Any]:
    """Return a record as a strict JSON reader sees it."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    values: dict[str, Any] = json.loads(encode(record), parse_constant=refuse)
    return values


@pytest.fixture
def world() -> World:
    world = World()
    for milliseconds in (10, 20, 30):
        world.answer(after_ms=milliseconds)
    world.answer(Placement.NEARBY, after_ms=100)
    world.refuse(Reason.QUEUE_FULL)
    world.refuse(Reason.THERMAL)
    world.expire(Placement.NEARBY)
    world.answer(origin="microphone")
    world.request()  # still in flight
    return world


def test_a_report_counts_per_loop_and_placement_and_adds_up(world: World) -> None:
    report = read(report_of(world.snapshot()))
    camera, microphone = report["origins"]
    assert (camera["origin"], microphone["origin"]) == ("camera", "microphone")
    assert camera["by_placement"] == {
        "local": {"ok": 3},
        "nearby": {"ok": 1, "expired": 1},
        "none": {"rejected": 2},
    }
    assert camera["reasons"] == {"rejected.queue_full": 1, "rejected.thermal": 1, "expired.queued": 1}
    assert camera["p50_ms"]["local"] == pytest.approx(20, rel=0.04)
    assert camera["p99_ms"]["local"] == pytest.approx(30, rel=0.04)
    assert camera["p99_ms"]["nearby"] == pytest.approx(100, rel=0.04)
    assert camera["deadline_hit_rate"] == pytest.approx(4 / 7)
    for counts in (report["total"], camera, microphone):
        assert counts["received"] == counts["in_flight"] + sum(counts[kind] for kind in OutcomeKind)
    assert report["total"]["received"] == 9
    assert report["balanced"] is True
    assert report["offloaded_share"] == pytest.approx(1 / 5)
    assert report["uptime_s"] == 100.0
    assert (report["queue_length"], report["running"]) == (3, 1)
    assert report["thermal"]["seconds_by_level"] == {"nominal": 12.0, "warm": 3.5}
    assert report["memory"]["peak_used_bytes"] == 95 << 20
    assert report["links"] == [{"name": "fleet", "state": "connected", "connects": 2, "counters": {"sent": 5}}]


def test_a_broken_identity_is_told(world: World) -> None:
    snapshot = world.snapshot()
    broken = replace(snapshot, origins=(*snapshot.origins, origin_figures("lost", OriginCounts(received=1))))
    assert read(report_of(broken))["balanced"] is False


def test_percentiles_of_nothing_and_unknown_temperatures_are_null() -> None:
    world = World(temp_mc=None, sensor=SensorState.MISSING)
    world.expire(Placement.LOCAL)
    report, state = (
        read(report_of(world.snapshot())),
        build_state(world.snapshot(), IDENTITY, STAMP, offload_open=False),
    )
    assert report["origins"][0]["p99_ms"] == {"local": None}
    assert report["offloaded_share"] is None
    assert read(state)["thermal"]["temp_c"] is None


def test_causes_of_throttling_and_the_forecast_are_reported(world: World) -> None:
    snapshot = world.snapshot()
    assert read(report_of(snapshot))["thermal"]["forecast"] is None
    governor = replace(
        snapshot.governor,
        throttled_by={Cause.OURS: 0.0, Cause.AMBIENT: 12.25},
        outlook=Outlook(0.9, True, idle_c=41.26, rise_c=39.9, tau_s=107.4, sustainable=0.61, next_trip_s=None),
    )
    thermal = read(report_of(replace(snapshot, governor=governor)))["thermal"]
    assert thermal["throttled_by"] == {"ours": 0.0, "ambient": 12.25}
    assert thermal["forecast"] == {
        "confidence": 0.9, "idle_c": 41.3, "rise_c": 39.9, "time_constant_s": 107.4, "sustainable": 0.61,
        "next_trip_s": None,
    }  # fmt: skip


def test_not_even_nan_breaks_the_json(world: World) -> None:
    snapshot = world.snapshot()
    odd = replace(snapshot, governor=replace(snapshot.governor, firmware_throttled_s=float("nan")))
    assert read(report_of(odd))["thermal"]["firmware_throttled_s"] is None


def test_a_report_without_any_request_can_be_read(world: World) -> None:
    report = report_of(World().snapshot())
    assert decode(encode(report), Report).origins == []
    assert read(report)["total"]["received"] == 0


def test_the_state_tells_models_loops_and_offload(world: World) -> None:
    state = read(build_state(world.snapshot(), IDENTITY, STAMP, offload_open=True))
    assert state["models"][0]["state"] == "loaded"
    assert state["loops"] == [
        {"name": "camera", "model": "det", "enabled": True, "period_ms": 40.0, "deadline_ms": 33.5}
    ]
    assert state["offload"] == {"enabled": True, "open": True, "peers": ["box"], "unusable": {}}
    assert state["thermal"]["level"] == "nominal"


def test_the_status_page_shows_every_model_loop_and_link(world: World) -> None:
    snapshot = world.snapshot()
    status = build_status(build_state(snapshot, IDENTITY, STAMP, offload_open=False), report_of(snapshot))
    assert status["ready"] is True
    assert json.loads(json.dumps(status, allow_nan=False)) == status
    page = describe_status(status)
    for words in ("running for 100 s", "nominal, 55.0 C", "50 MiB of 256 MiB", "det", "camera", "microphone",
                  "link fleet", "closed, box, 20.0%"):  # fmt: skip
        assert words in page


LOST = LoopFigures(
    "door", "det", enabled=True, period_ns=40_000_000, deadline_ns=33_500_000, problem="/srv/frames is no folder",
    taken=9, skipped=8, submitted=1, missed=7, stale=5, invalid=4, sequences_lost=3, source_restarts=2,
    results_dropped=6,
)  # fmt: skip


def test_what_a_loop_did_with_its_frames_is_reported_so_that_none_is_lost_silently(world: World) -> None:
    world.loops = (LOST,)
    assert read(report_of(world.snapshot()))["loops"] == [
        {"name": "door", "taken": 9, "skipped": 8, "submitted": 1, "missed": 7, "stale": 5, "invalid": 4,
         "sequences_lost": 3, "source_restarts": 2, "results_dropped": 6}
    ]  # fmt: skip


def test_what_was_turned_away_at_the_local_socket_is_reported(world: World) -> None:
    world.gateway = GatewayFigures(connections=2, submitted=30, abandoned=1, refused={"body_too_large": 4}, faults=5)
    assert read(report_of(world.snapshot()))["gateway"] == {
        "connections": 2, "submitted": 30, "abandoned": 1, "refused": {"body_too_large": 4}, "faults": 5,
    }  # fmt: skip
    assert "2 connected, 30 requests, 1 abandoned, 5 faults, refused at the door: body_too_large 4" in page_of(world)


def page_of(world: World, **changed: Any) -> str:
    snapshot = replace(world.snapshot(), **changed)
    return describe_status(
        build_status(build_state(snapshot, IDENTITY, STAMP, offload_open=False), report_of(snapshot))
    )


def test_a_loop_that_has_had_no_frame_is_on_the_status_page_with_the_reason(world: World) -> None:
    world.loops = (*world.loops, LOST)
    state = read(build_state(world.snapshot(), IDENTITY, STAMP, offload_open=False))
    assert state["loops"][1]["problem"] == "/srv/frames is no folder"
    rows = [line.split() for line in page_of(world).splitlines() if line.startswith("door ")]
    assert rows == [
        ["door", *["0"] * 6, "-", "-"],
        ["door", "40", "ms", "33.5", "ms", *"98754", *["/srv/frames", "is", "no", "folder;", "2", "restarts;", "3", "sequences", "lost;", "6", "results", "dropped"]],
    ]  # fmt: skip


def test_a_peer_that_is_no_use_is_on_the_status_page_with_the_reason(world: World) -> None:
    world.peers, world.peers_unusable = (), {"attic": "no bundle in common: det 6ac26d there, e17ac3 here"}
    assert "closed, attic (no bundle in common: det 6ac26d there, e17ac3 here), " in page_of(world)


def test_who_holds_the_memory_is_listed_and_adds_up(world: World) -> None:
    held = {OURSELVES: 10 << 20, "gateway": 64 << 20, "det/int8": 40 << 20, OUTGROWN: 3 << 20}
    why = "the machine has 90 MiB left; 70 MiB is in use by edgeinfer and its models"
    ledger = LedgerSnapshot(256 << 20, sum(held.values()), 90 << 20, held, 0, why)
    state = read(build_state(replace(world.snapshot(), ledger=ledger), IDENTITY, STAMP, offload_open=False))
    assert state["memory"]["held_bytes"] == held
    assert sum(state["memory"]["held_bytes"].values()) == state["memory"]["reserved_bytes"]
    assert state["memory"]["why_lowered"] == why
    page = page_of(world, ledger=ledger)
    assert "memory       117 MiB of 256 MiB reserved, 70 MiB used\n" in page
    shown = [line.split() for line in page.splitlines() if line.startswith(" " * 13)]
    assert shown == [
        ["64", "MiB", "gateway"], ["40", "MiB", "det/int8"], ["10", "MiB", *OURSELVES.split()],
        ["3.0", "MiB", *OUTGROWN.split()], why.split(),
    ]  # fmt: skip


def test_processes_are_told_by_their_ids(world: World) -> None:
    world.models = (replace(MODEL, pids=(411, 412)), replace(MODEL, name="out", state="unloaded"))
    pids: dict[str, Any] = {"pid": 400, "zygote_pid": 401}
    state = read(build_state(replace(world.snapshot(), **pids), IDENTITY, STAMP, offload_open=False))
    assert [model.get("pids") for model in state["models"]] == [[411, 412], None]
    assert (state["runtime"]["pid"], state["runtime"]["zygote_pid"]) == (400, 401)
    page = page_of(world, **pids)
    assert "generic-x86, pid 400, zygote 401\n" in page
    [row] = [line.split() for line in page.splitlines() if line.startswith("det ")]
    assert row[4:6] == ["411", "412"]


def test_the_status_page_of_a_device_that_knows_nothing_yet() -> None:
    world = World(temp_mc=None, models=(), link_states={}, peers=(), phase="starting")
    snapshot = world.snapshot()
    snapshot = replace(snapshot, used_bytes=None, peak_used_bytes=None, loops=())
    status = build_status(build_state(snapshot, IDENTITY, STAMP, offload_open=False), report_of(snapshot))
    assert status["ready"] is False
    assert "unknown" in describe_status(status)


def test_the_window_holds_what_ended_since_it_was_restarted(world: World) -> None:
    window = OutcomeWindow(now_ns=0)
    window.add(world.answer(after_ms=5))
    window.add(world.refuse())
    span_ns, [camera] = window.figures(now_ns=7)
    assert (span_ns, camera.ended[OutcomeKind.OK], camera.ended[OutcomeKind.REJECTED]) == (7, 1, 1)
    assert camera.balanced
    assert camera.deadline_hit_rate == 0.5
    window.restart(now_ns=10)
    assert window.figures(now_ns=12) == (2, ())


def test_the_state_and_the_page_tell_the_runtime_and_what_really_runs_a_model(world: World) -> None:
    cpu, openvino = "CPUExecutionProvider", "OpenVINOExecutionProvider"
    snapshot = replace(
        world.snapshot(),
        onnxruntime="1.32.0",
        providers=(cpu, openvino),
        models=(replace(MODEL, variant="fp32", providers=(openvino, cpu)), replace(MODEL, name="b", providers=(cpu,))),
    )
    state = build_state(snapshot, IDENTITY, STAMP, offload_open=False)
    assert read(state)["runtime"] == {"onnxruntime": "1.32.0", "providers": [cpu, openvino]}
    assert [model["providers"] for model in read(state)["models"]] == [[openvino, cpu], [cpu]]
    page = describe_status(build_status(state, report_of(snapshot)))
    assert "onnxruntime 1.32.0 with CPU, OpenVINO" in page
    assert "fp32 on OpenVINO, CPU" in page
    assert "on CPU" not in page


def test_the_page_tells_why_the_runtime_is_unusable(world: World) -> None:
    snapshot = replace(world.snapshot(), onnxruntime="", runtime_problem="importing onnxruntime failed: ImportError")
    page = describe_status(
        build_status(build_state(snapshot, IDENTITY, STAMP, offload_open=False), report_of(snapshot))
    )
    assert "unusable: importing onnxruntime failed" in page
