"""What an operator may write in device.toml and nearby.toml, and what is meant by leaving it out.

docs/configuration.md describes every key, and a test holds it against these classes. What contradicts itself is
`check`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Union

from edgeinfer.quantity import Bytes, Nanoseconds
from edgeinfer.request import DataScope


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
    keys: Path = Path("/etc/edgeinfer/keys")
    """The public keys by one of which bundles must be signed, when there is any."""
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
    frequency_cap: bool = False
    """True: the clock is capped before work is paused, where `scaling_max_freq` may be written."""


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
    keys: Path = Path("/etc/edgeinfer/keys")
    memory: MemorySection = field(default_factory=MemorySection)
    scheduler: SchedulerSection = field(default_factory=SchedulerSection)
    max_per_device: int = 16
    """Requests of one device that may wait or run at once."""
    advert_period: Nanoseconds = Nanoseconds(2_000_000_000)
