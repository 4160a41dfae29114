"""The service config: what an operator writes in device.toml and nearby.toml, checked completely at the door.

Usually 20 lines: models, loops, brokers; everything else has a default that is right on a small board.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgeinfer.config.sections import (
    BrokerSection,
    CameraSource,
    CommandSource,
    DeviceConfig,
    DeviceSection,
    DirectorySource,
    JsonLinesSink,
    LoopSection,
    MemorySection,
    MicrophoneSource,
    ModelSection,
    MqttSection,
    MqttSink,
    NearbyConfig,
    OffloadSection,
    PathsSection,
    RtspSource,
    SchedulerSection,
    SinkSection,
    SourceSection,
    TelemetrySection,
    ThermalSection,
    WavSource,
)

if TYPE_CHECKING:
    from edgeinfer.config.bounds import MAX_OFFLOAD_BYTES
    from edgeinfer.config.check import doubts
    from edgeinfer.config.load import load_device_config, load_nearby_config

__all__ = [
    "MAX_OFFLOAD_BYTES",
    "BrokerSection",
    "CameraSource",
    "CommandSource",
    "DeviceConfig",
    "DeviceSection",
    "DirectorySource",
    "JsonLinesSink",
    "LoopSection",
    "MemorySection",
    "MicrophoneSource",
    "ModelSection",
    "MqttSection",
    "MqttSink",
    "NearbyConfig",
    "OffloadSection",
    "PathsSection",
    "RtspSource",
    "SchedulerSection",
    "SinkSection",
    "SourceSection",
    "TelemetrySection",
    "ThermalSection",
    "WavSource",
    "doubts",
    "load_device_config",
    "load_nearby_config",
]

_READING = {
    "MAX_OFFLOAD_BYTES": "bounds", "doubts": "check", "load_device_config": "load", "load_nearby_config": "load",
}  # fmt: skip
"""What only whoever reads a file needs, by module: a service has that done by a child process (`daemon.reading`)."""


def __getattr__(name: str) -> Any:
    if name not in _READING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(f"{__name__}.{_READING[name]}"), name)
