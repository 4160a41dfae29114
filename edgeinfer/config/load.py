"""Read the service config's files: everything that is wrong with one is told at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeinfer.config.check import check_device, check_nearby
from edgeinfer.config.sections import (
    CameraSource,
    CommandSource,
    DeviceConfig,
    DirectorySource,
    JsonLinesSink,
    MicrophoneSource,
    MqttSink,
    NearbyConfig,
    RtspSource,
    SinkSection,
    SourceSection,
    WavSource,
)
from edgeinfer.errors import ConfigError, Problem
from edgeinfer.toml_file import load_toml, make_converter, structure

_SOURCES: dict[str, type[Any]] = {
    "directory": DirectorySource, "command": CommandSource, "wav": WavSource,
    "camera": CameraSource, "rtsp": RtspSource, "microphone": MicrophoneSource,
}  # fmt: skip
_SINKS: dict[str, type[Any]] = {"mqtt": MqttSink, "jsonl": JsonLinesSink}


def load_device_config(path: Path) -> DeviceConfig:
    """Read device.toml.

    Raises:
        ConfigError: with every problem found, by key path.
    """
    return structure(load_toml(path), DeviceConfig, str(path), _converter(), check_device)


def load_nearby_config(path: Path) -> NearbyConfig:
    """Read nearby.toml.

    Raises:
        ConfigError: with every problem found, by key path.
    """
    return structure(load_toml(path), NearbyConfig, str(path), _converter(), check_nearby)


def _converter() -> Any:
    converter = make_converter()

    def tagged(kinds: dict[str, type[Any]]) -> Any:
        known = ", ".join(kinds)

        def hook(value: Any, _: Any) -> Any:
            if not isinstance(value, dict):
                raise ValueError(f"{value!r} is not {{ kind = … }}; kinds are {known}")  # noqa: TRY004
            if "kind" not in value:
                raise ConfigError("", (Problem("kind", f"is required: one of {known}"),))
            kind = value["kind"]
            if not isinstance(kind, str) or kind not in kinds:
                raise ConfigError("", (Problem("kind", f"{kind!r} is not one of {known}"),))
            return converter.structure({key: item for key, item in value.items() if key != "kind"}, kinds[kind])

        return hook

    converter.register_structure_hook(SourceSection, tagged(_SOURCES))
    converter.register_structure_hook(SinkSection, tagged(_SINKS))
    return converter
