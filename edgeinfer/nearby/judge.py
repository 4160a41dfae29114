"""Decide whether a nearby service takes a request on, from what stands in it: pure, and before any worker is touched.

Whether it can be finished in time is the scheduler's decision, as on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer import oip
from edgeinfer.artifact.contract import check_inputs
from edgeinfer.artifact.manifest import Manifest
from edgeinfer.clock import NS_PER_MS
from edgeinfer.errors import ProtocolError
from edgeinfer.mqtt.exchange import Ask
from edgeinfer.request import DataScope, Deadlines, InferRequest, Reason, Refusal, Timeline

_UNKNOWN_TRIP_NS = NS_PER_MS
"""Both ways on a quiet LAN, for devices that haven't measured it yet."""
_MAX_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A bundle that this service answers for."""

    manifest: Manifest
    digest: str
    variant: str
    """The variant that is loaded."""


def judge(
    ask: Ask, models: Sequence[ServedModel], *, location: str, received_ns: int
) -> tuple[InferRequest, ServedModel] | Refusal:
    """Return the request to submit, or why it is refused.

    The remaining budget becomes an absolute deadline on our own clock, less half the round trip: that much of it
    has passed on the way here.
    """
    if ask.scope is DataScope.DEVICE or (ask.scope is DataScope.SITE and location != "site"):
        return Refusal(Reason.DATA_SCOPE, f"data of scope {ask.scope.name.lower()} may not be here ({location})")
    served = next((model for model in models if model.digest == ask.digest), None)
    if served is None or served.manifest.name != ask.model:
        have = [f"{model.manifest.name} {model.manifest.version} {model.digest[:12]}" for model in models]
        wanted = f"{ask.model[:64]} {ask.digest[:12]}"
        return Refusal(Reason.MODEL_UNAVAILABLE, f"{wanted} is not served; there are {', '.join(have) or 'none'}")
    if served.manifest.stateful:
        return Refusal(Reason.MODEL_UNAVAILABLE, f"{ask.model} is stateful: its requests stay where its state is")
    try:
        header, payload = oip.decode_request(ask.header, ask.tensors)
    except ProtocolError as error:
        return Refusal(Reason.INPUT_INVALID, str(error))
    if (refusal := check_inputs(served.manifest, header, payload)) is not None:
        return refusal
    trip_ns = _UNKNOWN_TRIP_NS if ask.trip_ns is None else ask.trip_ns
    request = InferRequest(
        model=ask.model,
        version=served.manifest.version,
        payload=payload,
        deadlines=Deadlines(received_ns + ask.budget_ns - trip_ns // 2),
        timeline=Timeline(received_ns=received_ns),
        priority=max(-_MAX_PRIORITY, min(_MAX_PRIORITY, ask.priority)),
        scope=DataScope.DEVICE,  # it has travelled; from here it goes no further
        firm=True,
        accept_late=ask.accept_late,
    )
    return request, served
