"""Read and write the JSON messages of edgeinfer: one record per kind, checked completely at the door.

Every record says when it was made (`stamp`). NaN and infinity, which JSON doesn't have, are written as null.
Unknown fields of commands are refused (a typo must not be obeyed halfway); those of other records are skipped, so
that an older reader understands a newer writer. docs/mqtt.md describes each field; a test holds it against this.
Where the records go is `topics`; tensors don't travel in JSON but as `edgeinfer.oip` bodies.
"""

from __future__ import annotations

import json
import logging
from typing import Any, TypeVar

import msgspec

from edgeinfer.errors import ProtocolError
from edgeinfer.mqtt.stamp import Stamp

MAX_RECORD_BYTES = 256 << 10
"""Longer JSON messages are refused unread."""

JSON_CONTENT_TYPE = "application/json"
OIP_CONTENT_TYPE = "application/vnd.kserve.inference"


class Status(msgspec.Struct, frozen=True, omit_defaults=True):
    """Birth and will: whether somebody is there."""

    online: bool
    stamp: Stamp
    """Of a will: when the connection was made that is now lost."""
    reason: str = ""
    """Why it is offline: `stopping`, or `connection_lost` when the broker had to say it."""
    version: str = ""
    """Of edgeinfer."""


class ModelState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model that is configured on a device."""

    name: str
    version: str = ""
    digest: str = ""
    """Bundle digest."""
    variant: str = ""
    state: str = ""
    """`loaded`, `unloaded`, `loading`, `quarantined` or `missing`."""
    workers: int = 0
    reserved_bytes: int = 0
    detail: str = ""
    providers: list[str] = []
    """Execution providers that really run it."""
    wanted_version: str = ""
    """The version that should serve, while an earlier one does; `detail` says why."""
    quarantined: list[str] = []
    """Version and variant of each of its variants that is left alone because it crashed too often."""
    pids: list[int] = []
    """Processes of its workers."""


class RuntimeState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What runs the models of a device."""

    onnxruntime: str = ""
    """Its version; empty while it is unusable."""
    providers: list[str] = []
    """Execution providers of its build, and installed plug-ins."""
    problem: str = ""
    """Why it is unusable."""
    pid: int = 0
    """Process of the service."""
    zygote_pid: int = 0
    """Process that workers are forked from; 0 while there is none."""


class LoopState(msgspec.Struct, frozen=True, omit_defaults=True):
    """An inference loop of a device."""

    name: str
    model: str
    enabled: bool
    period_ms: float
    deadline_ms: float
    scope: str = "device"
    finished: bool = False
    """Its source has no more frames."""
    problem: str = ""
    """What is wrong with its source right now; empty when nothing is."""


class Thermal(msgspec.Struct, frozen=True):
    """How warm the board is, and what that costs."""

    level: str
    """`nominal`, `warm`, `hot` or `critical`."""
    temp_c: float | None
    """None when no sensor can be believed."""
    zone: str
    sensor: str
    """State of the sensor, `ok` or what is wrong with it."""
    duty_cycle: float
    """Share of the time that local workers may run, 0.0 to 1.0."""
    reason: str = ""


class Memory(msgspec.Struct, frozen=True):
    """The memory budget of the models."""

    ceiling_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int
    used_bytes: int | None = None
    """Anonymous memory and tensor slots of all our processes, as the kernel counts them; None where it can't."""
    peak_used_bytes: int | None = None
    itself_bytes: int = 0
    """Of what is reserved: daemon and zygote."""
    beyond_bytes: int = 0
    """Of what is reserved: what workers take above what was reserved for them."""
    held_bytes: dict[str, int] = {}
    """What is reserved, by who holds it: it adds up to `reserved_bytes`."""
    why_lowered: str = ""
    """Why the budget is below the configured ceiling: what binds it, with the numbers; empty when nothing does."""
    pressure: str = "none"
    """`none`, `some`, `high` or `severe`: how much work suffers from want of memory."""
    pressure_reason: str = ""
    """The sensor that says so, with its value."""


class Offload(msgspec.Struct, frozen=True):
    """Whether requests are being sent next door."""

    enabled: bool
    open: bool
    """Whether requests overflow to a peer right now."""
    peers: list[str]
    """Nearby services that are usable right now."""
    unusable: dict[str, str] = {}
    """Nearby services that have advertised and can't be used right now, and why."""


class State(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a device is and how it stands."""

    stamp: Stamp
    board: str
    version: str
    """Of edgeinfer."""
    phase: str
    """`starting`, `running`, `draining` or `stopping`."""
    models: list[ModelState]
    loops: list[LoopState]
    thermal: Thermal
    memory: Memory
    offload: Offload
    runtime: RuntimeState = RuntimeState()


class OriginReport(msgspec.Struct, frozen=True):
    """What became of the requests of one loop or model since the service started."""

    origin: str
    received: int
    in_flight: int
    ok: int
    late: int
    rejected: int
    cancelled: int
    expired: int
    failed: int
    reasons: dict[str, int]
    """Of everything but `ok`: `rejected.queue_full`, `expired.running`, …"""
    ok_by_placement: dict[str, int]
    """`local`, `nearby`."""
    p50_ms: dict[str, float | None]
    """Latency of answered requests by placement, from capture or reception to the end."""
    p99_ms: dict[str, float | None]
    deadline_hit_rate: float | None
    """None before the first request ended."""
    by_placement: dict[str, dict[str, int]] = {}
    """How often each outcome happened at each placement: `local`, `nearby`, `none` (it never ran)."""


class RecentReport(msgspec.Struct, frozen=True):
    """What became of the requests of one loop or model that ended since the last report that went out."""

    origin: str
    reasons: dict[str, int]
    by_placement: dict[str, dict[str, int]]
    p50_ms: dict[str, float | None]
    p99_ms: dict[str, float | None]
    deadline_hit_rate: float | None


class LoopReport(msgspec.Struct, frozen=True):
    """What an inference loop did with its frames since the service started; its requests are an OriginReport."""

    name: str
    taken: int
    """Frames that the loop took from its source."""
    skipped: int
    """Frames that were replaced by newer ones in the source, or could not be read."""
    submitted: int
    """Frames that became requests."""
    missed: int
    """Points of its grid of periods that passed while it could not take a frame."""
    stale: int
    """Frames that were past their deadline before they were asked about."""
    invalid: int
    """Frames that do not fit the model's input."""
    sequences_lost: int
    """Times that a stateful model had to start again because a request did not end well."""
    source_restarts: int
    results_dropped: int
    """Results that its sinks could not keep."""


class GatewayReport(msgspec.Struct, frozen=True):
    """What came to the local socket since the service started."""

    connections: int = 0
    """Open right now."""
    submitted: int = 0
    """Requests handed on; what became of them is in the OriginReports."""
    abandoned: int = 0
    """Requests whose caller went away."""
    refused: dict[str, int] = {}
    """Requests that were refused at the door, by reason: they are in no other count."""
    faults: int = 0
    """Connections that ended by a fault of ours. Any is a bug."""


class ThermalForecast(msgspec.Struct, frozen=True):
    """What the thermal model says at this moment."""

    confidence: float
    """0 to 1."""
    idle_c: float
    """Where the board would settle without any load."""
    rise_c: float
    """By how much full load heats it."""
    time_constant_s: float
    sustainable: float | None
    """Load of the whole machine, 0 to 1, that it bears for ever."""
    next_trip_s: float | None
    """When the next trip is reached at the present load; None: never."""


class ThermalReport(msgspec.Struct, frozen=True):
    """Heat since the service started."""

    level: str
    temp_c: float | None
    peak_c: float | None
    seconds_by_level: dict[str, float]
    throttle_episodes: int
    firmware_throttled_s: float
    throttled_by: dict[str, float] = {}
    """Seconds in which firmware or kernel slowed the board down, by cause: `ours`, `others`, `ambient`, `power`."""
    forecast: ThermalForecast | None = None
    """None while the thermal model isn't trusted: then the trips alone decide."""


class LinkReport(msgspec.Struct, frozen=True):
    """What one MQTT link has done since the service started."""

    name: str
    state: str
    connects: int
    counters: dict[str, int]


class Report(msgspec.Struct, frozen=True):
    """Counters and percentiles since the service started; `received` always equals the sum of what became of it."""

    stamp: Stamp
    uptime_s: float
    total: OriginReport
    origins: list[OriginReport]
    thermal: ThermalReport
    memory: Memory
    offload: dict[str, int]
    """Counters of the offload executor; none where offload is off."""
    links: list[LinkReport]
    balanced: bool = True
    """Whether `received` equals the sum of what became of it, in total and for every origin. False is a bug."""
    queue_length: int = 0
    running: int = 0
    offloaded_share: float | None = None
    """Answers that came from next door, of all answers; None before the first."""
    recent_s: float = 0.0
    """Time that `recent` covers: one report period, or a whole outage of the link."""
    recent: list[RecentReport] = []
    loops: list[LoopReport] = []
    gateway: GatewayReport = GatewayReport()


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happened, told once."""

    stamp: Stamp
    kind: str
    """As the last level of the topic: `throttle-start`, `throttle-end`, `offload-open`, `offload-close`, …"""
    detail: str
    """For people."""
    fields: dict[str, Any] = {}
    """The numbers."""


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An order to a device; the verb is the last level of the topic."""

    id: str
    """Chosen by the sender, unique: a command that comes again is not obeyed again."""
    args: dict[str, Any] = {}
    issued_at: str = ""
    """Wall time of the sender, ISO 8601 with a zone."""
    ttl_s: float | None = None
    """Seconds after `issued_at` at which the command is void; None: never."""


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a command."""

    stamp: Stamp
    id: str
    verb: str
    outcome: str
    """`ok`, `refused` (nothing was done) or `failed` (something went wrong on the way)."""
    reason: str = ""
    """A short stable word, unless `ok`."""
    detail: str = ""
    result: dict[str, Any] = {}


class AdvertModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model that a nearby service answers for."""

    name: str
    version: str
    digest: str
    """Bundle digest: only the same digest is the same model."""
    variant: str = ""
    quality: float | None = None
    p50_us: int | None = None
    """Run time at the peer without its queue, as it observed; None before the first request."""
    p99_us: int | None = None
    """As it observed; what the toolchain measured before the first request, if it did."""
    stateful: bool = False


class Advert(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a nearby service offers right now."""

    online: bool
    stamp: Stamp
    name: str = ""
    location: str = "any"
    """Where it stands, as data scopes see it: `site` or `any`."""
    models: list[AdvertModel] = []
    wait_us: int = 0
    """Work that is queued ahead of a new request."""
    queue_length: int = 0
    running: int = 0
    max_request_bytes: int = 0
    period_ms: int = 0
    """How often the advert is refreshed; one that isn't for three periods is stale."""
    draining: bool = False
    reason: str = ""
    """Why it is offline."""
    answers_lost: int = 0
    """Requests since the service started that it could not answer: the broker did not take the answer in time, or
    there were too many at once."""


Record = Status | State | Report | Event | Command | Reply | Advert
R = TypeVar("R", bound=msgspec.Struct)

_log = logging.getLogger(__name__)

_encoder = msgspec.json.Encoder()
_told: set[type[Any]] = set()
"""Kinds that were too long once."""
_decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {}


def encode(record: Record) -> bytes:
    """Return a record as JSON; NaN and infinity become null.

    One that no reader would read is a bug of ours, and is logged once a kind: its writer has to bound what it holds.
    """
    payload = _encoder.encode(record)
    if len(payload) > MAX_RECORD_BYTES and type(record) not in _told and type(record) is not Reply:
        _told.add(type(record))
        _log.error(
            "%s of %d bytes is longer than the %d that are read", type(record).__name__, len(payload), MAX_RECORD_BYTES
        )
    return payload


def decode(payload: bytes, kind: type[R]) -> R:
    """Read a record and check it completely.

    Raises:
        ProtocolError: too long, not JSON, a name given twice in a command, or not such a record; the text says where.
    """
    if len(payload) > MAX_RECORD_BYTES:
        raise ProtocolError(f"{kind.__name__} of {len(payload)} bytes; at most {MAX_RECORD_BYTES} are read")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    try:
        record = decoder.decode(payload)
        if kind is Command:
            json.loads(payload, object_pairs_hook=_refuse_repeated_names)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a {kind.__name__}: {error}") from error
    return record  # type: ignore[no-any-return]


def _refuse_repeated_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(map(repr, repeated))} given more than once")
    return dict(pairs)
