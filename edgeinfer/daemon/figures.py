"""Turn what loops and the gateway say of themselves into the figures that telemetry reports. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgeinfer.gateway.gateway import GatewaySnapshot
from edgeinfer.telemetry.snapshot import GatewayFigures, LoopFigures

if TYPE_CHECKING:
    from edgeinfer.pipeline.loop import LoopSnapshot


def loop_figures(loop: LoopSnapshot, *, scope: str) -> LoopFigures:
    """Return how a loop is set up, and what its source, the loop itself and its sinks did with the frames."""
    return LoopFigures(
        name=loop.name,
        model=loop.model,
        enabled=loop.enabled,
        period_ns=loop.period_ns,
        deadline_ns=loop.deadline_ns,
        scope=scope,
        finished=loop.finished,
        problem=loop.source.problem,
        taken=loop.source.taken,
        skipped=loop.source.skipped,
        submitted=loop.submitted,
        missed=loop.missed,
        stale=loop.stale,
        invalid=loop.invalid,
        sequences_lost=loop.sequences_lost,
        source_restarts=loop.source.restarts,
        results_dropped=sum(sink.dropped for sink in loop.sinks),
    )


def gateway_figures(gateway: GatewaySnapshot) -> GatewayFigures:
    """Return what came to the local socket."""
    return GatewayFigures(
        connections=gateway.connections,
        submitted=gateway.submitted,
        abandoned=gateway.abandoned,
        refused=dict(gateway.refused),
        faults=gateway.faults,
    )
