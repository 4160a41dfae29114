"""Find what is worth an event in two consecutive snapshots.

Pure: `detect` takes the last snapshot, the newest one and what it knew, and returns what it knows now and the events.
Everything that could flap has hysteresis or a shortest pause between two events of its kind, so an hour of trouble is
some dozens of events, not thousands. docs/operations.md lists the kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgeinfer.clock import NS_PER_S
from edgeinfer.execution.model_cache import ModelStatus
from edgeinfer.limits import ThermalLevel
from edgeinfer.mqtt.backoff import LinkState
from edgeinfer.request import OutcomeKind, Placement, Reason
from edgeinfer.telemetry.snapshot import OriginFigures, Snapshot

OFFLOAD_WINDOW_NS = 10 * NS_PER_S
OFFLOAD_OPEN_AT = 2
"""So many requests next door within the window, and offloading is open; none within the window, and it is closed."""
BURST_WINDOW_NS = 5 * NS_PER_S
BURST_OPEN_AT = 10
BURST_OPEN_SHARE = 0.2
"""A burst begins when so many requests, and such a share of all that ended, were refused within the window ..."""
BURST_CLOSE_SHARE = 0.05
"""... and ends when less than this share was."""
CALM_NS = 30 * NS_PER_S
"""Shortest pause between two events about the same sensor, link or disk; the state it ends up in is always told."""
_ORDINARY = frozenset({Reason.SUPERSEDED.value, Reason.DRAINING.value})
"""Refusals that are no trouble: a newer frame took the place, or the service is going down on purpose."""
_MAX_SAMPLES = 256


KINDS: dict[str, str] = {
    # kind               when
    "throttle-start":    "local work begins to be held back because of heat",
    "throttle-level":    "the thermal level has changed while it is held back",
    "throttle-end":      "local work runs freely again",
    "sensor-fault":      "the temperature can't be believed any more",
    "sensor-ok":         "it can again",
    "offload-open":      "requests begin to overflow to a nearby service",
    "offload-close":     "none has gone there for a while",
    "refusal-burst":     "many requests are being refused",
    "refusal-burst-end": "they no longer are",
    "worker-crash":      "a worker process has died by itself",
    "worker-recycled":   "a worker took more memory than was reserved for it, and was replaced",
    "model-quarantined": "a variant's workers died too often; it is left alone",
    "model-released":    "it may be used again",
    "model-fallback":    "an earlier version serves instead of the one that is wanted",
    "model-restored":    "the wanted one serves again",
    "memory-pressure":   "work suffers from want of memory; the budget is lowered",
    "memory-ok":         "it no longer does",
    "source-fault":      "a loop's source can't give frames",
    "source-ok":         "it can again",
    "link-down":         "a broker can't be reached, or refuses us",
    "link-up":           "it is reached again",
    "storage-degraded":  "the state directory can't be written",
    "storage-ok":        "it can again",
}  # fmt: skip
"""Every event there is; the kind is the last level of its topic."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that happened, before it is stamped and sent."""

    kind: str
    """One of `KINDS`."""
    detail: str
    """For people."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    since_ns: int | None = None
    """Monotonic time at which what is told began, when that is not now: a state is told once it has held."""


@dataclass(frozen=True, slots=True)
class Told:
    """A state of something, and since when: since it was told, or since it is so."""

    value: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class Episode:
    """Something that is going on: since when, and what the counters said then."""

    since_ns: int
    total: OriginFigures


@dataclass(frozen=True, slots=True)
class Detection:
    """What `detect` remembers."""

    throttled: Episode | None = None
    level: ThermalLevel = ThermalLevel.NOMINAL
    offload: Episode | None = None
    burst: Episode | None = None
    samples: tuple[tuple[int, OriginFigures], ...] = ()
    """Totals at the snapshots of the last seconds, oldest first; the first is the baseline of the longest window."""
    told: Mapping[str, Told] = field(default_factory=dict)
    """The states that were told last."""
    seen: Mapping[str, Told] = field(default_factory=dict)
    """The states as they are, told or not."""

    @property
    def offload_open(self) -> bool:
        """Whether requests overflow to a peer right now."""
        return self.offload is not None


def detect(previous: Snapshot, current: Snapshot, state: Detection) -> tuple[Detection, list[Finding]]:
    """Return what is known now, and the events since `previous`. At the start both snapshots are the same."""
    samples = (*(state.samples or ((previous.at_ns, previous.total),)), (current.at_ns, current.total))
    state = replace(state, samples=_recent(samples, current.at_ns))
    findings: list[Finding] = []
    for step in (_throttling, _offloading, _refusing, _telling):
        state, found = step(previous, current, state)
        findings += found
    findings += _crashes(previous, current)
    findings += _recycled(previous, current)
    return state, findings


def _throttling(previous: Snapshot, current: Snapshot, state: Detection) -> tuple[Detection, list[Finding]]:
    limits, governor = current.limits, current.governor
    level = limits.level.name.lower()
    temp_c = None if governor.temp_mc is None else governor.temp_mc / 1000
    fields = {"level": level, "duty_cycle": limits.duty_cycle, "temp_c": temp_c, "zone": governor.zone}
    began, found = state.throttled, []
    missed = governor.throttle_episodes - previous.governor.throttle_episodes
    if began is None and not limits.throttled and missed > 0 and previous.governor.enabled:
        brief = fields | {"episodes": missed}
        found = [
            Finding("throttle-start", "local work was held back for a moment", brief),
            Finding("throttle-end", "local work runs freely again", brief),
        ]
    elif began is None and limits.throttled:
        began = Episode(current.at_ns, current.total)
        found = [Finding("throttle-start", limits.reason or f"level {level}", fields)]
    elif began is not None and not limits.throttled:
        seconds = (current.at_ns - began.since_ns) / NS_PER_S
        peak_c = None if governor.peak_mc is None else governor.peak_mc / 1000
        fields |= {"seconds": seconds, "peak_c": peak_c}
        found = [Finding("throttle-end", f"after {seconds:.0f} s: {limits.reason or level}", fields)]
        began = None
    elif began is not None and limits.level is not state.level:
        was = state.level.name.lower()
        found = [Finding("throttle-level", f"{was} to {level}: {limits.reason}", fields | {"was": was})]
    return replace(state, throttled=began, level=limits.level), found


def _offloading(_: Snapshot, current: Snapshot, state: Detection) -> tuple[Detection, list[Finding]]:
    since = _baseline(state.samples, current.at_ns - OFFLOAD_WINDOW_NS)
    nearby = current.total.ended_at(Placement.NEARBY) - since.ended_at(Placement.NEARBY)
    began = state.offload
    if began is None and nearby >= OFFLOAD_OPEN_AT:
        local = current.total.ended_at(Placement.LOCAL) - since.ended_at(Placement.LOCAL)
        fields = {"nearby": nearby, "local": local, "peers": list(current.peers)}
        detail = f"{nearby} requests went next door in the last {OFFLOAD_WINDOW_NS // NS_PER_S} s, {local} ran here"
        return replace(state, offload=Episode(current.at_ns, since)), [Finding("offload-open", detail, fields)]
    if began is not None and nearby == 0:
        sent = current.total.ended_at(Placement.NEARBY) - began.total.ended_at(Placement.NEARBY)
        ended = _ended(current.total) - _ended(began.total)
        seconds = (current.at_ns - began.since_ns) / NS_PER_S
        fields = {"seconds": seconds, "nearby": sent, "share": sent / ended if ended else None}
        detail = f"after {seconds:.0f} s and {sent} requests next door"
        return replace(state, offload=None), [Finding("offload-close", detail, fields)]
    return state, []


def _refusing(_: Snapshot, current: Snapshot, state: Detection) -> tuple[Detection, list[Finding]]:
    since = _baseline(state.samples, current.at_ns - BURST_WINDOW_NS)
    reasons = _refusals(current.total, since)
    refused, ended = sum(reasons.values()), _ended(current.total) - _ended(since)
    share = refused / ended if ended else 0.0
    if state.burst is None and refused >= BURST_OPEN_AT and share >= BURST_OPEN_SHARE:
        fields = {"refused": refused, "ended": ended, "reasons": reasons}
        detail = f"{refused} of {ended} requests refused in {BURST_WINDOW_NS // NS_PER_S} s ({_words(reasons)})"
        return replace(state, burst=Episode(current.at_ns, since)), [Finding("refusal-burst", detail, fields)]
    if state.burst is not None and share < BURST_CLOSE_SHARE:
        reasons = _refusals(current.total, state.burst.total)
        seconds = (current.at_ns - state.burst.since_ns) / NS_PER_S
        fields = {"seconds": seconds, "refused": sum(reasons.values()), "reasons": reasons}
        detail = f"after {seconds:.0f} s and {sum(reasons.values())} refusals ({_words(reasons)})"
        return replace(state, burst=None), [Finding("refusal-burst-end", detail, fields)]
    return state, []


def _telling(_: Snapshot, current: Snapshot, state: Detection) -> tuple[Detection, list[Finding]]:
    """Tell states that have changed, each at most every CALM_NS; the normal one is only told after another.

    So the second of two changes may be told late; `held_s` and `since_ns` say when it really was.
    """
    told, seen, findings = dict(state.told), dict(state.seen), []
    for subject, value, normal, finding in _subjects(current):
        since = seen.get(subject)
        if since is None or since.value != value:
            since = seen[subject] = Told(value, current.at_ns)
        last = told.get(subject)
        if value == (last.value if last else normal):
            continue
        if last is None or current.at_ns - last.at_ns >= CALM_NS:
            told[subject] = Told(value, current.at_ns)
            held_s = (current.at_ns - since.at_ns) / NS_PER_S
            findings.append(replace(finding, fields={**finding.fields, "held_s": held_s}, since_ns=since.at_ns))
    return replace(state, told=told, seen=seen), findings


def _subjects(current: Snapshot) -> Iterable[tuple[str, str, str, Finding]]:
    """Yield subject, its state, the state that needs no telling at the start, and what to tell."""
    fields: dict[str, Any]
    if current.sensor_matters:
        sensor = current.governor.sensor_state
        fields = {"sensor": "thermal", "zone": current.governor.zone, "state": sensor.value}
        kind = "sensor-fault" if sensor.fault else "sensor-ok"
        detail = f"thermal sensor {sensor.value}: {current.governor.reason}"
        yield "thermal", kind, "sensor-ok", Finding(kind, detail, fields)
    for loop in current.loops:
        kind = "source-fault" if loop.problem else "source-ok"
        fields = {"loop": loop.name, "taken": loop.taken, "restarts": loop.source_restarts}
        detail = f"{loop.name}: {loop.problem or 'its source gives frames again'}"
        yield f"loop {loop.name}", kind, "source-ok", Finding(kind, detail, fields)
    for link in current.links:
        if link.state in {LinkState.CONNECTING, LinkState.CLOSED}:
            continue
        up = link.state is LinkState.CONNECTED
        fields = {"link": link.name, "state": link.state.value, "connects": link.connects}
        kind = "link-up" if up else "link-down"
        detail = f"{link.name}: {link.state.value}" + ("" if up or not link.reason else f", {link.reason}")
        yield f"link {link.name}", link.state.value, LinkState.CONNECTED.value, Finding(kind, detail, fields)
    for model in current.models:
        yield from _model_subjects(model)
    pressure = current.pressure
    kind = "memory-pressure" if pressure.level else "memory-ok"
    fields = {"level": pressure.level.name.lower(), "ceiling_bytes": current.ledger.ceiling_bytes}
    detail = f"{fields['level']}: {pressure.why}" if pressure.level else "memory is no longer short"
    yield "memory", kind, "memory-ok", Finding(kind, detail, fields)
    kind = "storage-degraded" if current.storage_degraded else "storage-ok"
    detail = "the state directory cannot be written" if current.storage_degraded else "it can be written again"
    yield "storage", kind, "storage-ok", Finding(kind, detail)


def _model_subjects(model: ModelStatus) -> Iterable[tuple[str, str, str, Finding]]:
    """Yield which variants of a model are left alone, and whether another version serves than the wanted one."""
    serving = {"model": model.name, "version": model.version, "variant": model.variant, "state": model.state}
    quarantined = ", ".join(model.quarantined)
    bad = bool(quarantined) or model.state == "quarantined"
    kind = "model-quarantined" if bad else "model-released"
    said = [f"{quarantined} quarantined" if quarantined else "", model.detail]
    detail = f"{model.name}: {'; '.join(part for part in said if part) or 'may be used again'}"
    fields = {**serving, "quarantined": list(model.quarantined)}
    yield f"model {model.name}", quarantined or kind, "model-released", Finding(kind, detail, fields)
    wanted = model.wanted_version
    kind = "model-fallback" if wanted else "model-restored"
    detail = f"{model.name}: {model.version or 'nothing'} serves{f', not {wanted}: {model.detail}' if wanted else ''}"
    fields = {**serving, "wanted_version": wanted or model.version}
    yield f"version {model.name}", wanted or kind, "model-restored", Finding(kind, detail, fields)


def _crashes(previous: Snapshot, current: Snapshot) -> list[Finding]:
    findings = []
    for model, count in sorted(current.crashes.items()):
        new = count - previous.crashes.get(model, 0)
        if new > 0:
            detail = current.crash_details.get(model, "")
            fields = {"model": model, "crashes": new, "since_start": count}
            findings.append(Finding("worker-crash", f"{new} worker(s) of {model} died: {detail}", fields))
    return findings


def _recycled(previous: Snapshot, current: Snapshot) -> list[Finding]:
    before, findings = {model.name: model.recycled for model in previous.models}, []
    for model in current.models:
        new = model.recycled - before.get(model.name, 0)
        if new > 0:  # the count begins anew when a model is loaded anew
            fields = {"model": model.name, "recycled": new, "reserved_bytes": model.reserved_bytes}
            detail = f"{new} worker(s) of {model.name} took more than was reserved and could not shrink"
            findings.append(Finding("worker-recycled", detail, fields))
    return findings


def _recent(samples: tuple[tuple[int, OriginFigures], ...], now_ns: int) -> tuple[tuple[int, OriginFigures], ...]:
    """Drop what no window reaches any more, but keep one sample before the longest window as its baseline."""
    horizon_ns = now_ns - max(OFFLOAD_WINDOW_NS, BURST_WINDOW_NS)
    first = max((index for index, (at_ns, _) in enumerate(samples) if at_ns <= horizon_ns), default=0)
    return samples[max(first, len(samples) - _MAX_SAMPLES) :]


def _baseline(samples: tuple[tuple[int, OriginFigures], ...], since_ns: int) -> OriginFigures:
    """Return the totals at `since_ns`: of the newest sample that is not younger, else of the oldest there is."""
    return next((total for at_ns, total in reversed(samples) if at_ns <= since_ns), samples[0][1])


def _ended(total: OriginFigures) -> int:
    return sum(total.ended.values())


def _refusals(now: OriginFigures, then: OriginFigures) -> dict[str, int]:
    """Return the refusals between two totals by reason, without the ordinary ones, the most frequent first."""
    found = {
        reason: count - then.reasons.get((kind, reason), 0)
        for (kind, reason), count in now.reasons.items()
        if kind is OutcomeKind.REJECTED and reason not in _ORDINARY
    }
    return dict(sorted(((reason, count) for reason, count in found.items() if count > 0), key=lambda item: -item[1]))


def _words(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in reasons.items()) or "none"
