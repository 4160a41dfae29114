"""Turn a snapshot into the records that are published, and into text for people.

Pure: stamps and identities are handed in, nothing is sent. When records go out is `publisher`; what they look like on
the wire is `edgeinfer.mqtt.envelope`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from edgeinfer.clock import NS_PER_MS, NS_PER_S
from edgeinfer.errors import mib
from edgeinfer.execution.ledger import OURSELVES, OUTGROWN
from edgeinfer.governor.governor import Outlook
from edgeinfer.mqtt.envelope import (
    GatewayReport,
    LinkReport,
    LoopReport,
    LoopState,
    Memory,
    ModelState,
    Offload,
    OriginReport,
    RecentReport,
    Report,
    RuntimeState,
    State,
    Thermal,
    ThermalForecast,
    ThermalReport,
    encode,
)
from edgeinfer.mqtt.stamp import Stamp
from edgeinfer.request import OutcomeKind, Placement
from edgeinfer.telemetry.snapshot import LoopFigures, OriginFigures, Snapshot


@dataclass(frozen=True, slots=True)
class Identity:
    """What doesn't change while the service runs."""

    board: str
    """Name of the board file."""
    version: str
    """Of edgeinfer."""
    started_ns: int
    """Monotonic time of the start."""


@dataclass(frozen=True, slots=True)
class Recent:
    """What ended since the last report."""

    span_ns: int
    origins: tuple[OriginFigures, ...]


def build_state(snapshot: Snapshot, identity: Identity, stamp: Stamp, *, offload_open: bool) -> State:
    """Return what the device is and how it stands."""
    governor, limits = snapshot.governor, snapshot.limits
    return State(
        stamp=stamp,
        board=identity.board,
        version=identity.version,
        phase=snapshot.phase,
        models=[
            ModelState(
                name=model.name,
                version=model.version,
                digest=model.digest,
                variant=model.variant,
                state=model.state,
                workers=model.workers,
                reserved_bytes=model.reserved_bytes,
                detail=model.detail,
                providers=list(model.providers),
                wanted_version=model.wanted_version,
                quarantined=list(model.quarantined),
                pids=list(model.pids),
            )
            for model in snapshot.models
        ],
        loops=[
            LoopState(
                name=loop.name,
                model=loop.model,
                enabled=loop.enabled,
                period_ms=loop.period_ns / NS_PER_MS,
                deadline_ms=loop.deadline_ns / NS_PER_MS,
                scope=loop.scope,
                finished=loop.finished,
                problem=loop.problem,
            )
            for loop in snapshot.loops
        ],
        thermal=Thermal(
            level=limits.level.name.lower(),
            temp_c=_celsius(governor.temp_mc),
            zone=governor.zone,
            sensor=governor.sensor_state.value,
            duty_cycle=limits.duty_cycle,
            reason=limits.reason,
        ),
        memory=_memory(snapshot),
        offload=Offload(
            enabled=snapshot.offload_enabled,
            open=offload_open,
            peers=list(snapshot.peers),
            unusable=dict(snapshot.peers_unusable),
        ),
        runtime=RuntimeState(
            onnxruntime=snapshot.onnxruntime,
            providers=list(snapshot.providers),
            problem=snapshot.runtime_problem,
            pid=snapshot.pid,
            zygote_pid=snapshot.zygote_pid,
        ),
    )


def _forecast(outlook: Outlook) -> ThermalForecast | None:
    if outlook.idle_c is None or outlook.rise_c is None or outlook.tau_s is None:
        return None
    return ThermalForecast(
        confidence=round(outlook.confidence, 2),
        idle_c=round(outlook.idle_c, 1),
        rise_c=round(outlook.rise_c, 1),
        time_constant_s=round(outlook.tau_s, 1),
        sustainable=None if outlook.sustainable is None else round(outlook.sustainable, 2),
        next_trip_s=None if outlook.next_trip_s is None else round(outlook.next_trip_s, 1),
    )


def build_report(snapshot: Snapshot, identity: Identity, stamp: Stamp, recent: Recent) -> Report:
    """Return the counters and percentiles since the start, and of the recent past."""
    governor = snapshot.governor
    return Report(
        stamp=stamp,
        uptime_s=(snapshot.at_ns - identity.started_ns) / NS_PER_S,
        total=_origin(snapshot.total),
        origins=[_origin(origin) for origin in snapshot.origins],
        thermal=ThermalReport(
            level=snapshot.limits.level.name.lower(),
            temp_c=_celsius(governor.temp_mc),
            peak_c=_celsius(governor.peak_mc),
            seconds_by_level={level.name.lower(): round(s, 3) for level, s in governor.seconds_by_level.items()},
            throttle_episodes=governor.throttle_episodes,
            firmware_throttled_s=round(governor.firmware_throttled_s, 3),
            throttled_by={cause.value: round(s, 3) for cause, s in governor.throttled_by.items()},
            forecast=_forecast(governor.outlook),
        ),
        memory=_memory(snapshot),
        offload=dict(snapshot.offload_counters),
        links=[LinkReport(link.name, link.state.value, link.connects, dict(link.counters)) for link in snapshot.links],
        balanced=all(origin.balanced for origin in (snapshot.total, *snapshot.origins)),
        queue_length=snapshot.queue_length,
        running=snapshot.running,
        offloaded_share=offloaded_share(snapshot.total),
        recent_s=round(recent.span_ns / NS_PER_S, 3),
        recent=[_recent(origin) for origin in recent.origins],
        loops=[_loop(loop) for loop in snapshot.loops],
        gateway=GatewayReport(
            connections=snapshot.gateway.connections,
            submitted=snapshot.gateway.submitted,
            abandoned=snapshot.gateway.abandoned,
            refused=dict(snapshot.gateway.refused),
            faults=snapshot.gateway.faults,
        ),
    )


def offloaded_share(figures: OriginFigures) -> float | None:
    """Return the share of answers that came from next door; None before the first answer."""
    nearby = figures.answered_at(Placement.NEARBY)
    answers = nearby + figures.answered_at(Placement.LOCAL)
    return nearby / answers if answers else None


def build_status(state: State, report: Report) -> dict[str, Any]:
    """Return what local apps are told: the two records as plain JSON values, and whether requests are taken."""
    return {"ready": state.phase == "running", "state": plain(state), "report": plain(report)}


def plain(record: State | Report) -> dict[str, Any]:
    """Return a record as JSON values, exactly as a subscriber would read it (NaN is null)."""
    values: dict[str, Any] = msgspec.json.decode(encode(record))
    return values


def _runtime_line(runtime: Mapping[str, Any]) -> str:
    if not runtime.get("onnxruntime"):
        return f"unusable: {runtime.get('problem') or 'not started'}"
    return f"onnxruntime {runtime['onnxruntime']} with {_short(runtime.get('providers', []))}"


def _variant(model: Mapping[str, Any]) -> str:
    """Return the variant that is loaded, and what runs it where that isn't the CPU alone."""
    providers = _short(model.get("providers", []))
    return str(model.get("variant", "")) + (f" on {providers}" if providers not in {"", "CPU"} else "")


def _short(providers: Sequence[str]) -> str:
    return ", ".join(name.removesuffix("ExecutionProvider") for name in providers)


def describe_status(status: Mapping[str, Any]) -> str:
    """Return the status page of `edgeinfer status` as lines for a terminal."""
    state, report = status["state"], status["report"]
    thermal, memory = state["thermal"], state["memory"]
    temperature = "unknown" if thermal["temp_c"] is None else f"{thermal['temp_c']:.1f} C"
    heat = f"{thermal['level']}, {temperature} ({thermal['zone'] or 'no zone'}, sensor {thermal['sensor']})"
    used = "" if memory["used_bytes"] is None else f", {mib(memory['used_bytes'])} used"
    head = [
        ("service", f"{state['phase']} for {report['uptime_s']:.0f} s"),
        ("edgeinfer", f"{state['version']} on {state['board']}{_processes(state.get('runtime', {}))}"),
        ("runtime", _runtime_line(state.get("runtime", {}))),
        ("heat", f"{heat}, duty cycle {thermal['duty_cycle']:.0%}"),
        ("memory", f"{mib(memory['reserved_bytes'])} of {mib(memory['ceiling_bytes'])} reserved{used}"),
        *_holders(memory.get("held_bytes", {})),
        *([("", memory["why_lowered"])] if memory.get("why_lowered") else []),
        ("queue", f"{report['queue_length']} waiting, {report['running']} running"),
        ("offload", _offload_line(state["offload"], report["offloaded_share"])),
        ("local apps", _gateway_line(report["gateway"])),
        *((f"link {link['name']}", f"{link['state']}, {link['connects']} connects") for link in report["links"]),
    ]
    lines = [f"{name:<12} {text}" for name, text in head]
    models: list[tuple[str, ...]] = [("model", "version", "variant", "state", "pids", "reserved", "")]
    models += [
        (
            model["name"], model.get("version", ""), _variant(model), model.get("state", ""),
            " ".join(map(str, model.get("pids", []))) or "-", mib(model.get("reserved_bytes", 0)), _model_note(model),
        )
        for model in state["models"]
    ]  # fmt: skip
    origins: list[tuple[str, ...]] = [
        ("loop", "received", "local", "nearby", "rejected", "expired", "failed", "p50 / p99 ms", "in time")
    ]
    origins += [_origin_line(origin) for origin in report["origins"]]
    heard = {origin["origin"] for origin in report["origins"]}
    origins += [_silent_line(loop["name"]) for loop in state["loops"] if loop["name"] not in heard]
    parts = [lines, _columns(models), _columns(origins)]
    if state["loops"]:
        loops: list[tuple[str, ...]] = [
            ("loop", "period", "deadline", "taken", "skipped", "missed", "stale", "invalid", "source")
        ]
        loops += [_loop_line(loop, frames) for loop, frames in zip(state["loops"], report["loops"], strict=True)]
        parts.append(_columns(loops))
    return "\n\n".join("\n".join(part) for part in parts)


def _processes(runtime: Mapping[str, Any]) -> str:
    pids = [f"{name} {runtime[key]}" for name, key in (("pid", "pid"), ("zygote", "zygote_pid")) if runtime.get(key)]
    return f", {', '.join(pids)}" if pids else ""


def _holders(held_bytes: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return who holds what of the memory that is reserved, the most first; all that is reserved is in there."""
    largest = sorted(held_bytes.items(), key=lambda item: (-item[1], item[0]))
    return [("", f"{mib(size_bytes):>9}  {owner}") for owner, size_bytes in largest]


def _model_note(model: Mapping[str, Any]) -> str:
    """Return why a model stands as it does, and which of its variants are left alone."""
    quarantined = ", ".join(model.get("quarantined", []))
    notes = (model.get("detail", ""), f"quarantined: {quarantined}" if quarantined else "")
    return "; ".join(note for note in notes if note)


def _silent_line(loop: str) -> tuple[str, ...]:
    """Return the row of a loop that has asked for nothing yet."""
    return (loop, *["0"] * 6, "-", "-")


def _loop_line(loop: Mapping[str, Any], frames: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a loop did with its frames, and what is wrong with its source if anything is."""
    stands = loop.get("problem") or ("finished" if loop.get("finished") else "ok")
    notes = [stands if loop["enabled"] else f"disabled, {stands}"]
    for key, words in (
        ("source_restarts", "restarts"),
        ("sequences_lost", "sequences lost"),
        ("results_dropped", "results dropped"),
    ):
        if frames[key]:
            notes.append(f"{frames[key]} {words}")
    counts = (str(frames[key]) for key in ("taken", "skipped", "missed", "stale", "invalid"))
    return (loop["name"], f"{loop['period_ms']:g} ms", f"{loop['deadline_ms']:g} ms", *counts, "; ".join(notes))


def _gateway_line(gateway: Mapping[str, Any]) -> str:
    told = f"{gateway['connections']} connected, {gateway['submitted']} requests, {gateway['abandoned']} abandoned"
    if gateway["faults"]:
        told += f", {gateway['faults']} faults"
    refused = ", ".join(f"{reason} {count}" for reason, count in gateway["refused"].items())
    return f"{told}, refused at the door: {refused}" if refused else told


def _origin_line(origin: Mapping[str, Any]) -> tuple[str, ...]:
    p50, p99, rate = origin["p50_ms"], origin["p99_ms"], origin["deadline_hit_rate"]
    counts = [origin["received"], *(origin["ok_by_placement"].get(place, 0) for place in ("local", "nearby"))]
    counts += [origin[kind] for kind in ("rejected", "expired", "failed")]
    latency = ", ".join(f"{place} {_ms(p50[place])} / {_ms(p99[place])}" for place in p50) or "-"
    return (origin["origin"], *map(str, counts), latency, "-" if rate is None else f"{rate:.1%}")


def _offload_line(offload: Mapping[str, Any], share: float | None) -> str:
    if not offload["enabled"]:
        return "off"
    unusable = [f"{name} ({why})" for name, why in offload["unusable"].items()]
    peers = ", ".join([*offload["peers"], *unusable]) or "no peer"
    return f"{'open' if offload['open'] else 'closed'}, {peers}, {share or 0.0:.1%} of the answers so far"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _origin(figures: OriginFigures) -> OriginReport:
    return OriginReport(
        origin=figures.name,
        received=figures.received,
        in_flight=figures.in_flight,
        ok=figures.ended[OutcomeKind.OK],
        late=figures.ended[OutcomeKind.LATE],
        rejected=figures.ended[OutcomeKind.REJECTED],
        cancelled=figures.ended[OutcomeKind.CANCELLED],
        expired=figures.ended[OutcomeKind.EXPIRED],
        failed=figures.ended[OutcomeKind.FAILED],
        reasons=_reasons(figures),
        ok_by_placement={
            placement.value: at.outcomes[OutcomeKind.OK]
            for placement, at in figures.placements.items()
            if OutcomeKind.OK in at.outcomes
        },
        p50_ms=_percentiles(figures, 50),
        p99_ms=_percentiles(figures, 99),
        deadline_hit_rate=figures.deadline_hit_rate,
        by_placement=_outcomes(figures),
    )


def _recent(figures: OriginFigures) -> RecentReport:
    return RecentReport(
        origin=figures.name,
        reasons=_reasons(figures),
        by_placement=_outcomes(figures),
        p50_ms=_percentiles(figures, 50),
        p99_ms=_percentiles(figures, 99),
        deadline_hit_rate=figures.deadline_hit_rate,
    )


def _reasons(figures: OriginFigures) -> dict[str, int]:
    return {f"{kind.value}.{reason}": count for (kind, reason), count in sorted(figures.reasons.items())}


def _outcomes(figures: OriginFigures) -> dict[str, dict[str, int]]:
    return {
        placement.value: {kind.value: count for kind, count in at.outcomes.items()}
        for placement, at in figures.placements.items()
    }


def _percentiles(figures: OriginFigures, percent: int) -> dict[str, float | None]:
    """Return milliseconds by placement, for placements that answered anything."""
    found = {
        placement.value: at.p50_ns if percent == 50 else at.p99_ns
        for placement, at in figures.placements.items()
        if placement is not Placement.NONE
    }
    return {placement: None if value is None else value / NS_PER_MS for placement, value in found.items()}


def _memory(snapshot: Snapshot) -> Memory:
    ledger = snapshot.ledger
    return Memory(
        ceiling_bytes=ledger.ceiling_bytes,
        reserved_bytes=ledger.reserved_bytes,
        peak_reserved_bytes=ledger.peak_reserved_bytes,
        used_bytes=snapshot.used_bytes,
        peak_used_bytes=snapshot.peak_used_bytes,
        itself_bytes=ledger.by_owner.get(OURSELVES, 0),
        beyond_bytes=ledger.by_owner.get(OUTGROWN, 0),
        held_bytes=dict(ledger.by_owner),
        why_lowered=ledger.why_lowered,
        pressure=snapshot.pressure.level.name.lower(),
        pressure_reason=snapshot.pressure.why,
    )


def _loop(figures: LoopFigures) -> LoopReport:
    return LoopReport(
        name=figures.name,
        taken=figures.taken,
        skipped=figures.skipped,
        submitted=figures.submitted,
        missed=figures.missed,
        stale=figures.stale,
        invalid=figures.invalid,
        sequences_lost=figures.sequences_lost,
        source_restarts=figures.source_restarts,
        results_dropped=figures.results_dropped,
    )


def _celsius(value_mc: int | None) -> float | None:
    return None if value_mc is None else value_mc / 1000


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
