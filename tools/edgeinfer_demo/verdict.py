"""Judge a demo run from what the product itself reported: pure, so that a test can show each check failing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """What was answered during one phase, as differences of the daemon's own counters."""

    name: str
    seconds: float
    """How long it really was."""
    ok_local: dict[str, int]
    """Answers in time computed on the device, by loop."""
    ok_nearby: dict[str, int]
    """Answers in time that came from next door, by loop."""
    ended: dict[str, int]
    """Everything that ended, by loop."""


@dataclass(frozen=True, slots=True)
class Happening:
    """An event that the device told over MQTT."""

    at_s: float
    """Seconds since the demo's start at which the device told it."""
    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that a verdict is based on."""

    phases: tuple[PhaseRecord, ...]
    events: tuple[Happening, ...]
    """What came over MQTT, in order."""
    report: dict[str, Any]
    """The daemon's last report, as it reads it out over its socket."""
    intent: str
    """What the local app was answered for the sentence about the invoice."""
    exit_status: dict[str, int | None]
    """Of each process, None when it had to be killed."""
    firmware_throttled_s: float
    """By the emulated board's own account."""
    peak_c: float
    """Hottest moment of the emulated board."""
    others_cores: float = 0.0
    """Cores that other programs of this machine used meanwhile, on average."""


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, whether it held, and the numbers."""

    name: str
    ok: bool
    detail: str


STEADY_SHARE = 0.9
"""Of the requests while the board keeps up: other processes of a busy machine may cost some of them."""
OFFLOADED_SHARE = 0.1
"""Of the camera's answers while it delivers more than the board can do."""


def judge(evidence: Evidence) -> list[Check]:
    """Return every check; the demo fails when one of them does."""
    return [
        _identity(evidence.report),
        _steady(evidence),
        _offloaded(evidence),
        _throttling_reported(evidence),
        _never_firmware(evidence),
        _local_during_outage(evidence),
        _local_app(evidence),
        _clean_exit(evidence),
    ]


def identity_holds(counts: dict[str, Any]) -> bool:
    """Whether received = in flight + everything that ended, for one origin of a report."""
    ended = sum(counts[kind] for kind in ("ok", "late", "rejected", "cancelled", "expired", "failed"))
    return bool(counts["received"] == counts["in_flight"] + ended)


def _phase(evidence: Evidence, name: str) -> PhaseRecord:
    return next(phase for phase in evidence.phases if phase.name == name)


def _identity(report: dict[str, Any]) -> Check:
    origins = [report["total"], *report["origins"]]
    broken = [counts["origin"] for counts in origins if not identity_holds(counts)]
    received = report["total"]["received"]
    detail = f"broken for {', '.join(broken)}" if broken else f"{received} requests, each ended in exactly one outcome"
    return Check("accounting identity", not broken and received > 0, detail)


def _steady(evidence: Evidence) -> Check:
    phase = _phase(evidence, "steady")
    ended, local = sum(phase.ended.values()), sum(phase.ok_local.values())
    share = local / ended if ended else 0.0
    return Check("keeps up alone when it can", share >= STEADY_SHARE, f"{local} of {ended} answered locally in time")


def _offloaded(evidence: Evidence) -> Check:
    phase = _phase(evidence, "overload")
    nearby = phase.ok_nearby.get("camera", 0)
    answers = nearby + phase.ok_local.get("camera", 0)
    share = nearby / answers if answers else 0.0
    told = "offload-open" in _kinds(evidence)
    detail = f"{nearby} of the camera's {answers} answers came from next door ({share:.0%})"
    if share < OFFLOADED_SHARE:
        detail += f", less than {OFFLOADED_SHARE:.0%}"
    if not told:
        detail += ", but no offload-open event"
    return Check("offloads under overload", share >= OFFLOADED_SHARE and told, detail)


def _kinds(evidence: Evidence) -> list[str]:
    return [event.kind for event in evidence.events]


def _throttling_reported(evidence: Evidence) -> Check:
    kinds = _kinds(evidence)
    started, ended = kinds.count("throttle-start"), kinds.count("throttle-end")
    seconds = sum(
        value for level, value in evidence.report["thermal"]["seconds_by_level"].items() if level != "nominal"
    )
    detail = f"{started} throttle-start, {ended} throttle-end, {seconds:.0f} s above nominal"
    return Check("reports throttling and its end", started > 0 and ended > 0 and seconds > 0, detail)


def _never_firmware(evidence: Evidence) -> Check:
    detail = f"peak {evidence.peak_c:.1f} C, {evidence.firmware_throttled_s:.1f} s throttled by firmware"
    return Check("the firmware never had to throttle", evidence.firmware_throttled_s == 0, detail)


def _local_during_outage(evidence: Evidence) -> Check:
    phase = _phase(evidence, "outage")
    silent = [loop for loop, ended in phase.ended.items() if ended and not phase.ok_local.get(loop)]
    local = sum(phase.ok_local.values())
    detail = f"{local} local answers in {phase.seconds:.0f} s without a broker"
    if silent:
        detail += f"; none from {', '.join(silent)}"
    return Check("goes on locally during the outage", local > 0 and not silent, detail)


def _local_app(evidence: Evidence) -> Check:
    return Check("answers a local app", evidence.intent.startswith("support_request 0.9427"), evidence.intent)


def _clean_exit(evidence: Evidence) -> Check:
    wrong = {name: status for name, status in evidence.exit_status.items() if status != 0}
    return Check("drains and exits cleanly", not wrong, f"exit status {evidence.exit_status}")
