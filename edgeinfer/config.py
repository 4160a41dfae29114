"""The service config: what an operator writes in device.toml and nearby.toml, checked completely at the door.

Usually 20 lines: models, loops, brokers; everything else has a default that is right on a small board.
docs/configuration.md describes every key, and a test holds it against these classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

from edgeinfer.errors import ConfigError, Problem, mib
from edgeinfer.request import DataScope
from edgeinfer.toml_file import Bytes, Nanoseconds, load_toml, make_converter, structure

MAX_OFFLOAD_BYTES = 15 << 20
"""A link takes messages of at most 16 MiB; a header has to fit in, too."""

_TOPIC_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class DeviceSection:
    """Who this device is."""

    id: str = ""
    """One level of MQTT topics; default: from the machine id, so that cloned images don't collide."""
    site: str = "default"


@dataclass(frozen=True, slots=True)
class PathsSection:
    """Where things are; the roots can point at a fake tree."""

    state_dir: Path = Path("/var/lib/edgeinfer")
    socket: Path = Path("/run/edgeinfer/edgeinfer.sock")
    sys_root: Path = Path("/sys")
    proc_root: Path = Path("/proc")


@dataclass(frozen=True, slots=True)
class MemorySection:
    """Overrides of the board's memory budget."""

    ceiling: Bytes | None = None
    reserve: Bytes | None = None


@dataclass(frozen=True, slots=True)
class ThermalSection:
    """Overrides of the board's thermal policy."""

    enabled: bool = True
    """False: temperatures are reported, nothing is held back."""
    zones: list[str] | None = None
    sample_period: Nanoseconds = Nanoseconds(1_000_000_000)


@dataclass(frozen=True, slots=True)
class SchedulerSection:
    """Bounds of the queue and of a worker's life."""

    queue_limit: int = 64
    kill_grace: Nanoseconds = Nanoseconds(500_000_000)
    """From asking a worker to stop a run that is over its deadline to killing it. The caller was answered before;
    ONNX Runtime stops between two operators, and one operator may take long on a small board."""
    drain_timeout: Nanoseconds = Nanoseconds(5_000_000_000)
    cpus: list[int] | None = None
    """CPUs that workers may use; default all that the daemon may."""


@dataclass(frozen=True, slots=True)
class BrokerSection:
    """One MQTT 5 broker."""

    host: str
    port: int = 1883
    username: str = ""
    password_file: Path | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    keepalive_s: int = 15


@dataclass(frozen=True, slots=True)
class MqttSection:
    """The links. Without `fleet`, `site` serves for both; with neither, the device is on its own."""

    prefix: str = "edgeinfer"
    site: BrokerSection | None = None
    fleet: BrokerSection | None = None


@dataclass(frozen=True, slots=True)
class OffloadSection:
    """Falling back to a nearby service."""

    enabled: bool = True
    max_in_flight: int = 8
    max_request: Bytes = Bytes(4 << 20)


@dataclass(frozen=True, slots=True)
class TelemetrySection:
    """What is reported, and how often."""

    report_period: Nanoseconds = Nanoseconds(10_000_000_000)


@dataclass(frozen=True, slots=True)
class ModelSection:
    """A model that this service holds."""

    name: str
    version: str = ""
    """Empty: the active version of the store."""
    variant: str = ""
    """Empty: the best one that fits."""
    threads: int = 1
    pinned: bool = False
    """Never evicted."""
    preload: bool = True
    """False: loaded at the first request."""
    priority: int = 0
    workers: int = 1


@dataclass(frozen=True, slots=True)
class DirectorySource:
    """Files of a directory, in order of name, as if they were frames."""

    path: Path
    pattern: str = "*"
    mode: str = "replay"
    """`replay` (over and over, at the loop's period), `once`, or `watch` (new files as they come)."""


@dataclass(frozen=True, slots=True)
class CommandSource:
    """A child process that writes frames to its standard output; restarted with backoff when it ends."""

    argv: list[str]
    framing: str = "length"
    """`length` (4-byte little-endian length before each frame), `fixed` (`frame_bytes` each), `jpeg` (MJPEG stream),
    or `lines` (one text a line)."""
    frame_bytes: int = 0
    content_type: str = ""


@dataclass(frozen=True, slots=True)
class WavSource:
    """WAV files cut into chunks of the model's input, as if a microphone delivered them."""

    path: Path
    """A WAV file or a directory of them."""
    chunk_samples: int
    sample_rate_hz: int = 16000


@dataclass(frozen=True, slots=True)
class CameraSource:
    """A V4L2 camera (USB, or a board's own with such a driver), through ffmpeg."""

    device: Path = Path("/dev/video0")
    format: str = "auto"
    """`auto`: the camera's own JPEGs as they are, if it makes any, else its images, encoded here. Or one of its
    formats, as ffmpeg names them."""
    width: int = 0
    height: int = 0
    fps: int = 0


@dataclass(frozen=True, slots=True)
class RtspSource:
    """A network camera, through ffmpeg: RTSP, or any stream that ffmpeg reads from HTTP, TCP or UDP."""

    url: str
    transport: str = "tcp"
    """`tcp` or `udp`, for RTSP."""
    credentials_file: Path | None = None
    """Holds one line, `user:password`."""
    width: int = 0
    fps: int = 0


@dataclass(frozen=True, slots=True)
class MicrophoneSource:
    """An ALSA capture device, through arecord or ffmpeg, cut into chunks of the model's input."""

    chunk_samples: int
    sample_rate_hz: int = 16000
    device: str = "default"


SourceSection = Union[DirectorySource, CommandSource, WavSource, CameraSource, RtspSource, MicrophoneSource]


@dataclass(frozen=True, slots=True)
class MqttSink:
    """Publishes each result under the device's `result/LOOP` topic."""

    qos: int = 0
    outputs: list[str] | None = None
    """Outputs to include, default all that are at most 4 KiB."""


@dataclass(frozen=True, slots=True)
class JsonLinesSink:
    """Appends each result as a line of JSON, rotated at `max_bytes`."""

    path: Path
    max_bytes: Bytes = Bytes(16 << 20)
    outputs: list[str] | None = None


SinkSection = Union[MqttSink, JsonLinesSink]


@dataclass(frozen=True, slots=True)
class LoopSection:
    """A local inference loop: source, model, sinks."""

    name: str
    model: str
    source: SourceSection
    period: Nanoseconds
    """One frame is taken per period; what the source has beyond that is dropped, the newest wins."""
    deadline: Nanoseconds
    """From the capture of the frame to the result."""
    input: str = ""
    """Model input that takes the frame; default the first."""
    sinks: list[SinkSection] = field(default_factory=list)
    scope: str = "device"
    """How far the frames may travel: `device`, `site` or `any`."""
    priority: int = 0
    firm: bool = False
    """True: every accepted frame is a promise; False: newer frames supersede waiting ones."""
    enabled: bool = True

    @property
    def data_scope(self) -> DataScope:
        """The scope as the request carries it."""
        return DataScope[self.scope.upper()]


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """The whole of device.toml."""

    board: str = "auto"
    """A board's name, a path to a board file, or `auto`."""
    device: DeviceSection = field(default_factory=DeviceSection)
    paths: PathsSection = field(default_factory=PathsSection)
    memory: MemorySection = field(default_factory=MemorySection)
    thermal: ThermalSection = field(default_factory=ThermalSection)
    scheduler: SchedulerSection = field(default_factory=SchedulerSection)
    mqtt: MqttSection = field(default_factory=MqttSection)
    offload: OffloadSection = field(default_factory=OffloadSection)
    telemetry: TelemetrySection = field(default_factory=TelemetrySection)
    model: list[ModelSection] = field(default_factory=list)
    loop: list[LoopSection] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class NearbyConfig:
    """The whole of nearby.toml."""

    mqtt: MqttSection
    model: list[ModelSection]
    name: str = ""
    """One level of MQTT topics; default: from the machine id."""
    site: str = "default"
    location: str = "site"
    """Where it stands, as data scopes see it: `site` or `any`."""
    state_dir: Path = Path("/var/lib/edgeinfer-nearby")
    memory: MemorySection = field(default_factory=MemorySection)
    scheduler: SchedulerSection = field(default_factory=SchedulerSection)
    max_per_device: int = 16
    """Requests of one device that may wait or run at once."""
    advert_period: Nanoseconds = Nanoseconds(2_000_000_000)


_SOURCES: dict[str, type[Any]] = {
    "directory": DirectorySource, "command": CommandSource, "wav": WavSource,
    "camera": CameraSource, "rtsp": RtspSource, "microphone": MicrophoneSource,
}  # fmt: skip
_STREAM_URL = re.compile(r"(rtsps?|https?|tcp|udp)://(?P<user>[^/?#]*@)?[!-~]+")
_SINKS: dict[str, type[Any]] = {"mqtt": MqttSink, "jsonl": JsonLinesSink}


def load_device_config(path: Path) -> DeviceConfig:
    """Read device.toml.

    Raises:
        ConfigError: with every problem found, by key path.
    """
    config = structure(load_toml(path), DeviceConfig, str(path), _converter())
    if problems := list(_check_device(config)):
        raise ConfigError(str(path), tuple(problems))
    return config


def load_nearby_config(path: Path) -> NearbyConfig:
    """Read nearby.toml.

    Raises:
        ConfigError: with every problem found, by key path.
    """
    config = structure(load_toml(path), NearbyConfig, str(path), _converter())
    if problems := list(_check_nearby(config)):
        raise ConfigError(str(path), tuple(problems))
    return config


def _converter() -> Any:
    converter = make_converter()

    def tagged(kinds: dict[str, type[Any]]) -> Any:
        def hook(value: Any, _: Any) -> Any:
            kind = value.get("kind") if isinstance(value, dict) else None
            if kind not in kinds:
                raise ConfigError("", (Problem("kind", f"{kind!r} is not one of {', '.join(kinds)}"),))
            return converter.structure({key: item for key, item in value.items() if key != "kind"}, kinds[kind])

        return hook

    converter.register_structure_hook(SourceSection, tagged(_SOURCES))
    converter.register_structure_hook(SinkSection, tagged(_SINKS))
    return converter


def _check_device(config: DeviceConfig) -> Iterable[Problem]:
    yield from _check_word("device.id", config.device.id, optional=True)
    yield from _check_word("device.site", config.device.site)
    yield from _check_mqtt(config.mqtt)
    yield from _check_models(config.model)
    yield from _check_scheduler(config.scheduler)
    if config.thermal.sample_period < 10_000_000:
        yield Problem("thermal.sample_period", "must be at least 10 ms")
    if config.telemetry.report_period < 100_000_000:
        yield Problem("telemetry.report_period", "must be at least 100 ms")
    if config.offload.max_in_flight < 1:
        yield Problem("offload.max_in_flight", f"{config.offload.max_in_flight} is not at least 1")
    if not 1 <= config.offload.max_request <= MAX_OFFLOAD_BYTES:
        text = f"{mib(config.offload.max_request)} is not between 1 byte and the {mib(MAX_OFFLOAD_BYTES)} a link takes"
        yield Problem("offload.max_request", text)
    known = {model.name for model in config.model}
    yield from _duplicates("loop", [loop.name for loop in config.loop])
    for index, loop in enumerate(config.loop):
        path = f"loop[{index}]"
        yield from _check_word(f"{path}.name", loop.name)
        if loop.model not in known:
            yield Problem(f"{path}.model", f"{loop.model!r} is not a [[model]] (there are {sorted(known) or 'none'})")
        if loop.period < 1_000_000:
            yield Problem(f"{path}.period", "must be at least 1 ms")
        if loop.deadline < 1_000_000:
            yield Problem(f"{path}.deadline", "must be at least 1 ms")
        if loop.scope not in {"device", "site", "any"}:
            yield Problem(f"{path}.scope", f"{loop.scope!r} is not device, site or any")
        yield from _check_source(f"{path}.source", loop.source)
        for number, sink in enumerate(loop.sinks):
            if isinstance(sink, MqttSink) and sink.qos not in {0, 1}:
                yield Problem(f"{path}.sinks[{number}].qos", f"{sink.qos} is not 0 or 1")


def _check_nearby(config: NearbyConfig) -> Iterable[Problem]:
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
    if config.max_per_device < 1:
        yield Problem("max_per_device", f"{config.max_per_device} is not at least 1")


def _check_mqtt(mqtt: MqttSection) -> Iterable[Problem]:
    for word in mqtt.prefix.split("/"):
        yield from _check_word("mqtt.prefix", word)
    for name, broker in (("site", mqtt.site), ("fleet", mqtt.fleet)):
        if broker is None:
            continue
        if not 1 <= broker.port <= 65535:
            yield Problem(f"mqtt.{name}.port", f"{broker.port} is not between 1 and 65535")
        if not 1 <= broker.keepalive_s <= 3600:
            yield Problem(f"mqtt.{name}.keepalive_s", f"{broker.keepalive_s} is not between 1 and 3600")
        if (broker.tls_cert is None) != (broker.tls_key is None):
            yield Problem(f"mqtt.{name}.tls_cert", "tls_cert and tls_key belong together")


def _check_models(models: list[ModelSection]) -> Iterable[Problem]:
    yield from _duplicates("model", [model.name for model in models])
    for index, model in enumerate(models):
        yield from _check_word(f"model[{index}].name", model.name)
        if model.threads < 1:
            yield Problem(f"model[{index}].threads", f"{model.threads} is not at least 1")
        if not 1 <= model.workers <= 16:
            yield Problem(f"model[{index}].workers", f"{model.workers} is not between 1 and 16")


def _check_scheduler(scheduler: SchedulerSection) -> Iterable[Problem]:
    if scheduler.queue_limit < 1:
        yield Problem("scheduler.queue_limit", f"{scheduler.queue_limit} is not at least 1")
    if scheduler.cpus is not None and not scheduler.cpus:
        yield Problem("scheduler.cpus", "must name at least one CPU")


def _check_source(path: str, source: SourceSection) -> Iterable[Problem]:
    if isinstance(source, DirectorySource) and source.mode not in {"replay", "once", "watch"}:
        yield Problem(f"{path}.mode", f"{source.mode!r} is not replay, once or watch")
    if isinstance(source, CommandSource):
        if not source.argv:
            yield Problem(f"{path}.argv", "must name a program")
        if source.framing not in {"length", "fixed", "jpeg", "lines"}:
            yield Problem(f"{path}.framing", f"{source.framing!r} is not length, fixed, jpeg or lines")
        if source.framing == "fixed" and source.frame_bytes < 1:
            yield Problem(f"{path}.frame_bytes", 'is required with framing = "fixed"')
    if isinstance(source, WavSource | MicrophoneSource):
        if source.chunk_samples < 1:
            yield Problem(f"{path}.chunk_samples", f"{source.chunk_samples} is not at least 1")
        if source.sample_rate_hz < 1:
            yield Problem(f"{path}.sample_rate_hz", f"{source.sample_rate_hz} is not at least 1")
    if isinstance(source, CameraSource | RtspSource):
        yield from _check_camera(path, source)


def _check_camera(path: str, source: CameraSource | RtspSource) -> Iterable[Problem]:
    for name, value in (("width", source.width), ("fps", source.fps)):
        if value < 0:
            yield Problem(f"{path}.{name}", f"{value} is negative; 0 leaves it as it is")
    if isinstance(source, CameraSource):
        if not source.device.is_absolute():
            yield Problem(f"{path}.device", f"{source.device} is not an absolute path such as /dev/video0")
        if min(source.width, source.height) < 0 or (source.width > 0) != (source.height > 0):
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


def _duplicates(path: str, names: list[str]) -> Iterable[Problem]:
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem(path, f"name {name!r} is used {names.count(name)} times")
