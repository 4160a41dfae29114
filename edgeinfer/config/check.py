"""Find what is wrong with a service config beyond types, and what is odd about it.

Pure. Every check goes over what could be read: None stands for an element of a list that could not (see
`toml_file.structure`), so that a slip in one section hides nothing in the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from edgeinfer.config.bounds import check_bounds
from edgeinfer.config.sections import (
    CameraSource,
    CommandSource,
    DeviceConfig,
    DirectorySource,
    LoopSection,
    ModelSection,
    MqttSection,
    MqttSink,
    NearbyConfig,
    RtspSource,
    SchedulerSection,
    SourceSection,
)
from edgeinfer.errors import Problem

T = TypeVar("T")

MODEL_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?")
"""What bundles may be called; the manifest's own rule, which a test holds this against."""

_HOST = re.compile(r"[^\s\x00-\x20\x7f]{1,253}")
_MAX_USERNAME_BYTES = 1024
_MAX_SOCKET_BYTES = 107
"""sun_path of Linux, without its final zero; the service refuses a longer one, too."""
_TOPIC_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_STREAM_URL = re.compile(r"(rtsps?|https?|tcp|udp)://(?P<user>[^/?#]*@)?[!-~]+")


def check_device(config: DeviceConfig) -> Iterable[Problem]:
    """Yield what is wrong with a device.toml."""
    yield from check_bounds(config)
    yield from _check_word("device.id", config.device.id, optional=True)
    yield from _check_word("device.site", config.device.site)
    if (length := len(os.fsencode(config.paths.socket))) > _MAX_SOCKET_BYTES:
        yield Problem("paths.socket", f"has {length} bytes, a socket's path has at most {_MAX_SOCKET_BYTES}")
    yield from _check_mqtt(config.mqtt)
    yield from _check_models(config.model)
    yield from _check_scheduler(config.scheduler)
    yield from _duplicates("loop", config.loop)
    for path, loop in _each("loop", config.loop):
        yield from _check_loop(path, loop, config.model)


def doubts(config: DeviceConfig) -> Iterable[Problem]:
    """Yield what is allowed but can hardly be meant: loops whose results or frames have no way out."""
    if config.mqtt.site is not None or config.mqtt.fleet is not None:
        return
    for path, loop in _each("loop", config.loop):
        if any(isinstance(sink, MqttSink) for sink in loop.sinks):
            yield Problem(f"{path}.sinks", "results go to MQTT, but there is no broker: add [mqtt.site]")
        if loop.scope != "device":
            text = f"{loop.scope!r} lets frames go next door, but there is no broker: add [mqtt.site]"
            yield Problem(f"{path}.scope", text)


def _check_loop(path: str, loop: LoopSection, models: Sequence[ModelSection | None]) -> Iterable[Problem]:
    yield from _check_word(f"{path}.name", loop.name)
    known = sorted(model.name for model in models if model is not None)
    if loop.model not in known and None not in models:
        yield Problem(f"{path}.model", f"{loop.model!r} is not a [[model]] (there are {known or 'none'})")
    if loop.scope not in {"device", "site", "any"}:
        yield Problem(f"{path}.scope", f"{loop.scope!r} is not device, site or any")
    yield from _check_source(f"{path}.source", loop.source)


def check_nearby(config: NearbyConfig) -> Iterable[Problem]:
    """Yield what is wrong with a nearby.toml."""
    yield from check_bounds(config)
    yield from _check_word("name", config.name, optional=True)
    yield from _check_word("site", config.site)
    yield from _check_mqtt(config.mqtt)
    yield from _check_models(config.model)
    yield from _check_scheduler(config.scheduler)
    if config.mqtt.site is None:
        yield Problem("mqtt.site", "is required: requests come over it")
    if not config.model:
        yield Problem("model", "at least one [[model]] is needed")
    if config.location not in {"site", "any"}:
        yield Problem("location", f"{config.location!r} is not site or any")


def _check_mqtt(mqtt: MqttSection) -> Iterable[Problem]:
    for word in mqtt.prefix.split("/"):
        yield from _check_word("mqtt.prefix", word)
    for name, broker in (("site", mqtt.site), ("fleet", mqtt.fleet)):
        if broker is None:
            continue
        if not _HOST.fullmatch(broker.host):
            text = "is not 1 to 253 characters without blanks: the broker's name or address"
            yield Problem(f"mqtt.{name}.host", text)
        if len(broker.username.encode()) > _MAX_USERNAME_BYTES:
            yield Problem(f"mqtt.{name}.username", f"has more than {_MAX_USERNAME_BYTES} bytes")
        if (broker.tls_cert is None) != (broker.tls_key is None):
            yield Problem(f"mqtt.{name}.tls_cert", "tls_cert and tls_key belong together")


def _check_models(models: Sequence[ModelSection | None]) -> Iterable[Problem]:
    yield from _duplicates("model", models)
    for path, model in _each("model", models):
        if not MODEL_NAME.fullmatch(model.name):
            text = "no bundle can have this name: 1 to 64 lower-case letters, digits, . _ - (edgeinfer bundle list)"
            yield Problem(f"{path}.name", f"{model.name!r}: {text}")


def _check_scheduler(scheduler: SchedulerSection) -> Iterable[Problem]:
    if scheduler.cpus is not None and not scheduler.cpus:
        yield Problem("scheduler.cpus", "must name at least one CPU")


def _check_source(path: str, source: SourceSection) -> Iterable[Problem]:
    if isinstance(source, DirectorySource) and source.mode not in {"replay", "once", "watch"}:
        yield Problem(f"{path}.mode", f"{source.mode!r} is not replay, once or watch")
    if isinstance(source, CommandSource):
        if not source.argv or not source.argv[0]:
            yield Problem(f"{path}.argv", "must name a program")
        if source.framing not in {"length", "fixed", "jpeg", "lines"}:
            yield Problem(f"{path}.framing", f"{source.framing!r} is not length, fixed, jpeg or lines")
        if source.framing == "fixed" and source.frame_bytes < 1:
            yield Problem(f"{path}.frame_bytes", 'is required with framing = "fixed"')
    if isinstance(source, CameraSource | RtspSource):
        yield from _check_camera(path, source)


def _check_camera(path: str, source: CameraSource | RtspSource) -> Iterable[Problem]:
    if isinstance(source, CameraSource):
        if not source.device.is_absolute():
            yield Problem(f"{path}.device", f"{source.device} is not an absolute path such as /dev/video0")
        if (source.width > 0) != (source.height > 0):
            yield Problem(f"{path}.height", "width and height belong together, both positive")
        return
    if source.transport not in {"tcp", "udp"}:
        yield Problem(f"{path}.transport", f"{source.transport!r} is not tcp or udp")
    match = _STREAM_URL.fullmatch(source.url)
    if match is None or "'" in source.url or "\\" in source.url:
        yield Problem(f"{path}.url", "is not an rtsp, rtsps, http, https, tcp or udp URL without blanks and quotes")
    elif match["user"] is not None:
        yield Problem(f"{path}.url", "holds credentials, which would be seen; put user:password into credentials_file")


def _check_word(path: str, value: str, *, optional: bool = False) -> Iterable[Problem]:
    if not (optional and not value) and not _TOPIC_WORD.fullmatch(value):
        yield Problem(path, f"{value!r} is not 1 to 64 letters, digits, _ . - (it becomes part of MQTT topics)")


def _each(path: str, items: Sequence[T | None]) -> Iterator[tuple[str, T]]:
    """Yield every element that could be read, with its key path."""
    for index, item in enumerate(items):
        if item is not None:
            yield f"{path}[{index}]", item


def _duplicates(path: str, sections: Sequence[ModelSection | None] | Sequence[LoopSection | None]) -> Iterable[Problem]:
    first: dict[str, int] = {}
    for index, section in enumerate(sections):
        if section is not None and first.setdefault(section.name, index) != index:
            text = f"{section.name!r} is the name of {path}[{first[section.name]}] already"
            yield Problem(f"{path}[{index}].name", text)
