"""The service config: what an operator writes in device.toml and nearby.toml, checked completely at the door.

Usually 20 lines: models, loops, brokers; everything else has a default that is right on a small board.
"""

from __future__ import annotations

from edgeinfer.config.bounds import MAX_OFFLOAD_BYTES
from edgeinfer.config.check import doubts
from edgeinfer.config.load import load_device_config, load_nearby_config
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
