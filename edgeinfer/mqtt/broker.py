"""What is known of a connection from outside: what its broker allows, and why it ended.

Apart from `session`, so that whoever reads of a link does not load the protocol's library.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.mqtt.backoff import LinkState


@dataclass(frozen=True, slots=True)
class BrokerLimits:
    """What the broker said in its CONNACK."""

    max_packet_bytes: int | None
    """Larger packets make it close the connection; None: no limit of its own."""
    receive_maximum: int
    """Unacknowledged QoS 1 publishes that it takes at once."""
    keepalive_s: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Why a connection is over."""

    state: LinkState
    reason: str
