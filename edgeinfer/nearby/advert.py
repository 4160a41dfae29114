"""Tell devices what this service offers right now: the retained advert, its birth and its will.

Pure builders; when they are published is `server`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgeinfer.clock import NS_PER_US
from edgeinfer.execution.window import LatencyWindow
from edgeinfer.mqtt.envelope import JSON_CONTENT_TYPE, Advert, AdvertModel, encode
from edgeinfer.mqtt.message import Message
from edgeinfer.mqtt.stamp import Stamp
from edgeinfer.mqtt.topics import Topics
from edgeinfer.nearby.judge import ServedModel
from edgeinfer.scheduling.snapshot import SchedulerSnapshot

_HEADER_ROOM_BYTES = 64 << 10
"""For the JSON header in front of the tensors."""

_PACKET_ROOM_BYTES = 4 << 10
"""For topic and properties around a body."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the service is."""

    queue_length: int
    running: int
    wait_ns: int
    """What a new request would wait for work ahead of it."""
    draining: bool = False


def load_of(snapshot: SchedulerSnapshot) -> Load:
    """Return the load that a scheduler's snapshot shows."""
    return Load(
        queue_length=snapshot.queue_length,
        running=snapshot.running_local,
        wait_ns=snapshot.work_ahead_ns // max(1, snapshot.cores),
        draining=snapshot.draining,
    )


def build_advert(
    *,
    name: str,
    location: str,
    period_ns: int,
    models: Sequence[ServedModel],
    run_times: Mapping[str, LatencyWindow],
    load: Load,
    max_incoming_bytes: int,
    answers_lost: int = 0,
    stamp: Stamp,
) -> Advert:
    """Return the advert of this moment; `run_times` are what was observed, by bundle digest."""
    largest_bytes = max((max_body_bytes(model) for model in models), default=0)
    return Advert(
        online=True,
        stamp=stamp,
        name=name,
        location=location,
        models=[_offer(model, run_times.get(model.digest)) for model in models],
        wait_us=load.wait_ns // NS_PER_US,
        queue_length=load.queue_length,
        running=load.running,
        max_request_bytes=min(largest_bytes, max_incoming_bytes - _PACKET_ROOM_BYTES),
        period_ms=period_ns // 1_000_000,
        draining=load.draining,
        answers_lost=answers_lost,
    )


def max_body_bytes(model: ServedModel) -> int:
    """Return the largest body that a request for the model can have."""
    return model.manifest.max_request_bytes + _HEADER_ROOM_BYTES


def advert_message(topics: Topics, advert: Advert) -> Message:
    """Return the message that publishes an advert: retained, so that a device that comes later knows at once."""
    return Message(
        topic=topics.advert(topics.device),
        payload=encode(advert),
        qos=1,
        retain=True,
        content_type=JSON_CONTENT_TYPE,
    )


def offline_message(topics: Topics, stamp: Stamp, *, reason: str) -> Message:
    """Return the advert of a service that isn't there: what it says when it stops, and its will."""
    return advert_message(topics, Advert(online=False, stamp=stamp, name=topics.device, reason=reason))


def will(topics: Topics, stamp: Stamp) -> Message:
    """Return the will to connect with: the broker publishes it when the service vanishes."""
    return offline_message(topics, stamp, reason="connection_lost")


def _offer(model: ServedModel, run_times: LatencyWindow | None) -> AdvertModel:
    variant = model.manifest.variant(model.variant)
    seed_us = max(variant.latency_us.values(), default=None)  # of the fewest threads, most likely: no promise too much
    seen = run_times if run_times is not None and len(run_times) else None
    return AdvertModel(
        name=model.manifest.name,
        version=model.manifest.version,
        digest=model.digest,
        variant=model.variant,
        quality=variant.quality,
        p50_us=None if seen is None else seen.p50_ns // NS_PER_US,
        p99_us=seed_us if seen is None else seen.p99_ns // NS_PER_US,
        stateful=model.manifest.stateful,
    )
