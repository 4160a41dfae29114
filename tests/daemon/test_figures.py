"""Every count that a loop or the gateway keeps reaches the report: one that is forgotten is lost silently."""

from __future__ import annotations

import dataclasses

from edgeinfer.daemon.figures import gateway_figures, loop_figures
from edgeinfer.gateway.gateway import GatewaySnapshot
from edgeinfer.pipeline.frame import SourceSnapshot
from edgeinfer.pipeline.loop import LoopSnapshot
from edgeinfer.pipeline.sink import SinkSnapshot

LOOP = LoopSnapshot(
    name="camera", model="det", enabled=False, period_ns=11, deadline_ns=12, outstanding=13, submitted=14, missed=15,
    stale=16, invalid=17, sequences_lost=18, finished=True,
    source=SourceSnapshot(taken=19, skipped=20, restarts=21, problem="unplugged"),
    sinks=(SinkSnapshot("mqtt", 22, 23), SinkSnapshot("jsonl", 24, 25)),
)  # fmt: skip


def test_every_count_of_a_loop_is_reported() -> None:
    figures = dataclasses.asdict(loop_figures(LOOP, scope="site"))
    assert figures == {
        "name": "camera", "model": "det", "enabled": False, "period_ns": 11, "deadline_ns": 12, "scope": "site",
        "finished": True, "problem": "unplugged", "taken": 19, "skipped": 20, "submitted": 14, "missed": 15,
        "stale": 16, "invalid": 17, "sequences_lost": 18, "source_restarts": 21, "results_dropped": 23 + 25,
    }  # fmt: skip
    told = {field.name for field in dataclasses.fields(LoopSnapshot)} - {"outstanding", "source", "sinks"}
    assert told <= figures.keys(), "a new count of loops has to be reported"


def test_every_count_of_the_gateway_is_reported() -> None:
    snapshot = GatewaySnapshot(connections=1, submitted=2, refused={"bad_request": 3}, abandoned=4, faults=5)
    assert dataclasses.asdict(gateway_figures(snapshot)) == dataclasses.asdict(snapshot)
