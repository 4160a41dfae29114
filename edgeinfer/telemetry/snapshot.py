"""Freeze what the daemon knows at one moment, for everything that is reported.

The daemon assembles a `Snapshot` from the rooms that own the facts; `report`, `events` and the status page only read
it. Times are monotonic nanoseconds. Also keeps the outcomes since the last report (`OutcomeWindow`), because
percentiles since the start of a long-running service say nothing about today.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgeinfer.execution.ledger import LedgerSnapshot
from edgeinfer.execution.model_cache import ModelStatus
from edgeinfer.execution.pressure import CALM, PressureState
from edgeinfer.governor.governor import GovernorSnapshot
from edgeinfer.limits import Limits
from edgeinfer.metrics import Accounting, LatencyHistogram, OriginCounts
from edgeinfer.request import Outcome, OutcomeKind, Placement

if TYPE_CHECKING:
    from edgeinfer.mqtt.link import LinkSnapshot


@dataclass(frozen=True, slots=True)
class PlacementFigures:
    """What became of the requests of one origin at one placement."""

    outcomes: Mapping[OutcomeKind, int]
    p50_ns: int | None
    """Of answered requests, from capture or reception to the end; None when there were none."""
    p99_ns: int | None


@dataclass(frozen=True, slots=True)
class OriginFigures:
    """What became of the requests of one loop or model."""

    name: str
    received: int
    in_flight: int
    ended: Mapping[OutcomeKind, int]
    """Every kind, also those that never happened."""
    reasons: Mapping[tuple[OutcomeKind, str], int]
    placements: Mapping[Placement, PlacementFigures]
    """Only placements where something ended."""
    deadline_hit_rate: float | None
    balanced: bool
    """Whether the accounting identity holds."""

    def ended_at(self, placement: Placement) -> int:
        """Return how many requests ended there, whatever became of them."""
        figures = self.placements.get(placement)
        return sum(figures.outcomes.values()) if figures else 0

    def answered_at(self, placement: Placement) -> int:
        """Return how many answers came from there, in time or late."""
        figures = self.placements.get(placement)
        if figures is None:
            return 0
        return figures.outcomes.get(OutcomeKind.OK, 0) + figures.outcomes.get(OutcomeKind.LATE, 0)


def origin_figures(name: str, counts: OriginCounts) -> OriginFigures:
    """Return a frozen copy of the counters of one origin."""
    placements = {}
    for placement in Placement:
        outcomes = {kind: counts.placed[placement, kind] for kind in OutcomeKind if counts.placed[placement, kind]}
        if outcomes:
            latency = counts.latency.get(placement, _NOTHING)
            placements[placement] = PlacementFigures(outcomes, latency.percentile_ns(50), latency.percentile_ns(99))
    return OriginFigures(
        name=name,
        received=counts.received,
        in_flight=counts.in_flight,
        ended={kind: counts.ended[kind] for kind in OutcomeKind},
        reasons=dict(counts.reasons),
        placements=placements,
        deadline_hit_rate=counts.deadline_hit_rate,
        balanced=counts.balanced,
    )


def accounting_figures(accounting: Accounting) -> tuple[OriginFigures, tuple[OriginFigures, ...]]:
    """Return the total and every origin."""
    origins = (origin_figures(name, counts) for name, counts in sorted(accounting.origins.items()))
    return origin_figures("total", accounting.total), tuple(origins)


class OutcomeWindow:
    """The outcomes of the time since the last `restart`. Loop thread only; memory grows with origins, not with time."""

    def __init__(self, now_ns: int) -> None:
        self._since_ns = now_ns
        self._origins: dict[str, OriginCounts] = {}

    def add(self, outcome: Outcome) -> None:
        """Count a request that ended. Call once for each, when it ends: its result may still be leased."""
        counts = self._origins.setdefault(outcome.request.origin, OriginCounts())
        counts.received += 1
        counts.ended[outcome.kind] += 1
        counts.placed[outcome.placement, outcome.kind] += 1
        if outcome.reason:
            counts.reasons[outcome.kind, outcome.reason] += 1
        if outcome.result is not None:
            counts.latency.setdefault(outcome.placement, LatencyHistogram()).add(outcome.latency_ns)

    def figures(self, now_ns: int) -> tuple[int, tuple[OriginFigures, ...]]:
        """Return the length of the window and what ended in it, by origin."""
        origins = (origin_figures(name, counts) for name, counts in sorted(self._origins.items()))
        return now_ns - self._since_ns, tuple(origins)

    def restart(self, now_ns: int) -> None:
        """Forget the outcomes; the window begins now."""
        self._since_ns = now_ns
        self._origins = {}


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """How an inference loop is set up right now, and what became of its frames since the start.

    What became of its requests is in the origins.
    """

    name: str
    model: str
    enabled: bool
    period_ns: int
    deadline_ns: int
    scope: str = "device"
    finished: bool = False
    problem: str = ""
    """What is wrong with its source right now."""
    taken: int = 0
    skipped: int = 0
    submitted: int = 0
    missed: int = 0
    stale: int = 0
    invalid: int = 0
    sequences_lost: int = 0
    source_restarts: int = 0
    results_dropped: int = 0


@dataclass(frozen=True, slots=True)
class GatewayFigures:
    """What came to the local socket since the start; what became of what was submitted is in the origins."""

    connections: int = 0
    submitted: int = 0
    abandoned: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    faults: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that is reported, at one moment."""

    at_ns: int
    phase: str
    """`starting`, `running`, `draining` or `stopping`."""
    total: OriginFigures
    origins: tuple[OriginFigures, ...]
    queue_length: int
    running: int
    governor: GovernorSnapshot
    limits: Limits
    """In force."""
    ledger: LedgerSnapshot
    used_bytes: int | None = None
    """Anonymous memory and slots of all our processes, what the budget is about; None where it can't be read."""
    peak_used_bytes: int | None = None
    pressure: PressureState = CALM
    """Why less may be reserved than is available."""
    models: tuple[ModelStatus, ...] = ()
    loops: tuple[LoopFigures, ...] = ()
    links: tuple[LinkSnapshot, ...] = ()
    offload_enabled: bool = False
    peers: tuple[str, ...] = ()
    """Nearby services that are usable right now."""
    peers_unusable: Mapping[str, str] = field(default_factory=dict)
    """Those that have advertised and are not usable, and why."""
    offload_counters: Mapping[str, int] = field(default_factory=dict)
    crashes: Mapping[str, int] = field(default_factory=Counter)
    """Workers that died by themselves since the start, by model."""
    crash_details: Mapping[str, str] = field(default_factory=dict)
    """How the last worker of each model died."""
    onnxruntime: str = ""
    """Version of the runtime; empty while it is unusable."""
    providers: tuple[str, ...] = ()
    """Execution providers that it has, installed plug-ins included."""
    runtime_problem: str = ""
    pid: int = 0
    """Of the service."""
    zygote_pid: int = 0
    storage_degraded: bool = False
    """The state directory can't be written."""
    gateway: GatewayFigures = field(default_factory=GatewayFigures)
    sensor_matters: bool = True
    """Whether local work is held back while the temperature can't be believed."""


_NOTHING = LatencyHistogram()
