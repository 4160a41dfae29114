"""A small device whose facts a test sets, and the snapshots that it gives."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgeinfer.clock import NS_PER_S
from edgeinfer.execution.ledger import OURSELVES, LedgerSnapshot
from edgeinfer.execution.model_cache import ModelStatus
from edgeinfer.execution.pressure import CALM, PressureState
from edgeinfer.governor.governor import GovernorSnapshot
from edgeinfer.limits import Limits, ThermalLevel
from edgeinfer.metrics import Accounting
from edgeinfer.mqtt.backoff import LinkState
from edgeinfer.mqtt.link import LinkSnapshot
from edgeinfer.request import (
    Deadlines,
    Ending,
    Expired,
    InferRequest,
    Outcome,
    Payload,
    Placement,
    Reason,
    Refusal,
    Result,
    Timeline,
    conclude,
)
from edgeinfer.sensors.firmware import Slowdown
from edgeinfer.sensors.state import SensorState
from edgeinfer.telemetry.snapshot import GatewayFigures, LoopFigures, Snapshot, accounting_figures

MODEL = ModelStatus(
    name="det", version="1.0", digest="d" * 64, variant="int8", state="loaded", workers=1,
    reserved_bytes=50 << 20, leases=0, state_resets=0, load_ms=120.0, detail="",
)  # fmt: skip


@dataclass
class World:
    """Facts, changed by tests; `snapshot` freezes them."""

    now_ns: int = 1000 * NS_PER_S
    accounting: Accounting = field(default_factory=Accounting)
    level: ThermalLevel = ThermalLevel.NOMINAL
    duty_cycle: float = 1.0
    temp_mc: int | None = 55_000
    sensor: SensorState = SensorState.OK
    episodes: int = 0
    phase: str = "running"
    models: tuple[ModelStatus, ...] = (MODEL,)
    pressure: PressureState = CALM
    link_states: dict[str, LinkState] = field(default_factory=lambda: {"fleet": LinkState.CONNECTED})
    peers: tuple[str, ...] = ("box",)
    crashes: dict[str, int] = field(default_factory=dict)
    storage_degraded: bool = False
    sensor_matters: bool = True
    peers_unusable: dict[str, str] = field(default_factory=dict)
    loops: tuple[LoopFigures, ...] = (
        LoopFigures("camera", "det", enabled=True, period_ns=40_000_000, deadline_ns=33_500_000),
    )
    gateway: GatewayFigures = GatewayFigures()

    def request(self, origin: str = "camera") -> InferRequest:
        request = InferRequest(
            model="det", payload=Payload(b"{}"), stream=origin,
            deadlines=Deadlines(self.now_ns + NS_PER_S), timeline=Timeline(received_ns=self.now_ns),
        )  # fmt: skip
        self.accounting.received(request)
        return request

    def end(self, request: InferRequest, ending: Ending, placement: Placement, after_ns: int) -> Outcome:
        outcome = conclude(request, ending, now_ns=self.now_ns + after_ns, placement=placement)
        self.accounting.ended(outcome)
        return outcome

    def answer(self, placement: Placement = Placement.LOCAL, *, after_ms: int = 20, origin: str = "camera") -> Outcome:
        result = Result(Payload(b"{}"), placement, "here", "1.0", "int8")
        return self.end(self.request(origin), result, placement, after_ms * 1_000_000)

    def refuse(self, reason: Reason = Reason.QUEUE_FULL) -> Outcome:
        return self.end(self.request(), Refusal(reason), Placement.NONE, 0)

    def expire(self, placement: Placement = Placement.LOCAL) -> Outcome:
        return self.end(self.request(), Expired(), placement, NS_PER_S)

    def snapshot(self) -> Snapshot:
        total, origins = accounting_figures(self.accounting)
        return Snapshot(
            at_ns=self.now_ns,
            phase=self.phase,
            total=total,
            origins=origins,
            queue_length=3,
            running=1,
            governor=GovernorSnapshot(
                enabled=True, temp_mc=self.temp_mc, zone="cpu-thermal", sensor_state=self.sensor, level=self.level,
                duty_cycle=self.duty_cycle, level_changes=0, peak_mc=81_250, throttle_episodes=self.episodes,
                seconds_by_level={ThermalLevel.NOMINAL: 12.0, ThermalLevel.WARM: 3.5}, slowdown=Slowdown.NONE,
                firmware_throttled_s=0.0, power_throttled_s=0.0, clock_hz=None, clock_cap_hz=None, busy_share=None,
                reason="zone cpu-thermal",
            ),
            limits=Limits(self.level, frozenset({0, 1}), self.duty_cycle, 256 << 20, reason="zone cpu-thermal 81.2 C"),
            ledger=LedgerSnapshot(256 << 20, 50 << 20, 90 << 20, {"det": 40 << 20, OURSELVES: 10 << 20}, 0),
            used_bytes=70 << 20,
            pressure=self.pressure,
            peak_used_bytes=95 << 20,
            models=self.models,
            loops=self.loops,
            links=tuple(LinkSnapshot(name, state, "why", 2, 0, {"sent": 5}) for name, state in self.link_states.items()),
            offload_enabled=True,
            peers=self.peers,
            offload_counters={"late_replies": 1},
            crashes=dict(self.crashes),
            crash_details=dict.fromkeys(self.crashes, "killed by signal 11"),
            storage_degraded=self.storage_degraded,
            gateway=self.gateway,
            sensor_matters=self.sensor_matters,
            peers_unusable=dict(self.peers_unusable),
        )  # fmt: skip
