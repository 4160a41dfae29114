"""What the demo does to the device, as data: load, ambient temperature and the broker's state over time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of time with constant outside conditions."""

    name: str
    seconds: float
    camera_period_ms: int
    """How often the camera delivers a frame: the load."""
    ambient_c: float
    broker_up: bool
    note: str


PHASES = (
    Phase("steady", 15, 500, 22.0, broker_up=True, note="two frames a second: the board keeps up by itself"),
    Phase("overload", 25, 60, 22.0, broker_up=True, note="16 frames a second: more than the board can do"),
    Phase("heat", 35, 150, 62.0, broker_up=True, note="the sun comes out; still seven frames a second"),
    Phase("cool", 25, 500, 18.0, broker_up=True, note="a breeze; back to two frames a second"),
    Phase("outage", 20, 250, 18.0, broker_up=False, note="the broker dies: the device is on its own"),
    Phase("recovery", 15, 250, 18.0, broker_up=True, note="the broker is back"),
)
