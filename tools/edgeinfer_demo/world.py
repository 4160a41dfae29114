"""Start and stop what the demo consists of: broker, nearby service, device daemon, emulated board.

Owns the processes and their files, all below one folder. Nothing here decides anything about inference.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from edgeinfer.artifact.board import shipped_boards
from edgeinfer.errors import LinkError

MODELS = ("pp-ocr-det", "silero-vad", "support-intent")
SITE = "demo"
DEVICE = "demo-board"
NEARBY = "demo-nearby"
BOARD = shipped_boards() / "demo-board.toml"

_BROKER_CONF = """\
listener {port} 127.0.0.1
allow_anonymous true
set_tcp_nodelay true
persistence false
max_packet_size 16777216
log_type error
"""

_DEVICE_TOML = """\
board = "{board}"

[device]
id = "{device}"
site = "{site}"

[paths]
state_dir = "{root}/device"
socket = "{root}/edgeinfer.sock"
sys_root = "{root}/sys"

[thermal]
enabled = {governor}
sample_period = "250 ms"

[mqtt.site]
host = "127.0.0.1"
port = {port}
keepalive_s = 3

[offload]
enabled = {offload}

[telemetry]
report_period = "1 s"

[[model]]
name = "pp-ocr-det"

[[model]]
name = "silero-vad"
pinned = true
priority = 10

[[model]]
name = "support-intent"

[[loop]]
name = "camera"
model = "pp-ocr-det"
source = {{ kind = "directory", path = "{frames}" }}
period = "500 ms"
deadline = "{camera_deadline_ms} ms"
scope = "site"
sinks = [{{ kind = "mqtt" }}, {{ kind = "jsonl", path = "{root}/camera.jsonl" }}]

[[loop]]
name = "microphone"
model = "silero-vad"
source = {{ kind = "wav", path = "{audio}", chunk_samples = 512 }}
period = "32 ms"
deadline = "32 ms"
priority = 10
sinks = [{{ kind = "jsonl", path = "{root}/microphone.jsonl" }}]
"""

_NEARBY_TOML = """\
name = "{nearby}"
site = "{site}"
state_dir = "{root}/nearby"

[mqtt.site]
host = "127.0.0.1"
port = {port}
keepalive_s = 3

[scheduler]
cpus = [{cpu}]

[[model]]
name = "pp-ocr-det"
"""

KEPT = ("daemon.log", "nearby.log", "mosquitto.log", "device.toml", "nearby.toml", "mosquitto.conf")
"""What is of use once the run is over."""


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class World:
    """The processes and files of one demo run."""

    root: Path
    bundles: Path
    board: Path = BOARD
    governor: bool = True
    offload: bool = True
    camera_deadline_ms: int = 600
    port: int = field(default_factory=free_port)
    broker: subprocess.Popen[bytes] | None = None
    nearby: subprocess.Popen[bytes] | None = None
    daemon: subprocess.Popen[bytes] | None = None

    @property
    def frames(self) -> Path:
        """Folder of the camera's frames."""
        return self.root / "frames"

    @property
    def audio(self) -> Path:
        """Folder of the microphone's recordings."""
        return self.root / "audio"

    @property
    def socket(self) -> Path:
        """The daemon's UNIX socket."""
        return self.root / "edgeinfer.sock"

    def write_files(self) -> None:
        """Write the configuration of broker, nearby service and device."""
        cpus = sorted(os.sched_getaffinity(0))
        values = {
            "root": self.root, "port": self.port, "site": SITE, "device": DEVICE, "nearby": NEARBY,
            "board": self.board, "frames": self.frames, "audio": self.audio, "cpu": cpus[-1],
            "governor": str(self.governor).lower(), "offload": str(self.offload).lower(),
            "camera_deadline_ms": self.camera_deadline_ms,
        }  # fmt: skip
        for name, text in (
            ("mosquitto.conf", _BROKER_CONF),
            ("device.toml", _DEVICE_TOML),
            ("nearby.toml", _NEARBY_TOML),
        ):
            (self.root / name).write_text(text.format(**values), encoding="utf-8")

    def install(self) -> None:
        """Install the bundles on both sides, as an operator would."""
        for state_dir, models in ((self.root / "device", MODELS), (self.root / "nearby", MODELS[:1])):
            for model in models:
                self._edgeinfer(
                    "bundle", "add", str(self.bundles / model), "--no-compile", "--state-dir", str(state_dir)
                )

    def start_broker(self) -> None:
        """Start mosquitto on the demo's port, where it was before when it is started again."""
        mosquitto = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
        if mosquitto is None:
            raise LinkError("mosquitto is not installed; `make setup` installs it")
        self.broker = self._start("mosquitto", [mosquitto, "-c", str(self.root / "mosquitto.conf")])
        _wait_for_port(self.port, self.broker)

    def stop_broker(self) -> None:
        """Kill the broker without a goodbye, as a power cut would."""
        if self.broker is not None:
            self.broker.kill()
            self.broker.wait(timeout=10)

    def start_nearby(self) -> None:
        """Start the nearby service."""
        self.nearby = self._start("nearby", [*_edgeinfer(), "nearby", "--config", str(self.root / "nearby.toml")])

    def start_daemon(self) -> None:
        """Start the device daemon."""
        self.daemon = self._start("daemon", [*_edgeinfer(), "run", "--config", str(self.root / "device.toml")])

    def stop_services(self) -> dict[str, int | None]:
        """End the daemon and the nearby service, politely first; return their exit status, None for a killed one."""
        return _end({"daemon": self.daemon, "nearby": self.nearby})

    def stop(self) -> dict[str, int | None]:
        """End everything; as `stop_services`."""
        return self.stop_services() | _end({"mosquitto": self.broker})

    def log(self, name: str) -> Path:
        """Return the file that holds what a process wrote."""
        return self.root / f"{name}.log"

    def _start(self, name: str, argv: list[str]) -> subprocess.Popen[bytes]:
        with self.log(name).open("ab") as log:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def _edgeinfer(self, *args: str) -> None:
        done = subprocess.run([*_edgeinfer(), *args], capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0:
            raise LinkError(f"edgeinfer {' '.join(args)} ended with {done.returncode}: {done.stderr.strip()}")


def _end(processes: dict[str, subprocess.Popen[bytes] | None]) -> dict[str, int | None]:
    ended: dict[str, int | None] = {}
    for name, process in processes.items():
        if process is None:
            continue
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            ended[name] = process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=5)
            ended[name] = None
    return ended


@contextlib.contextmanager
def running(world: World) -> Iterator[World]:
    """Stop everything at the end, whatever happened."""
    try:
        yield world
    finally:
        world.stop()


@contextlib.contextmanager
def keeping(world: World, out: Path) -> Iterator[None]:
    """Copy logs and configuration to `out` at the end, whatever happened: the folder of the run is temporary."""
    try:
        yield
    finally:
        out.mkdir(parents=True, exist_ok=True)
        for name in KEPT:
            if (source := world.root / name).exists():
                shutil.copyfile(source, out / name)


def _edgeinfer() -> list[str]:
    return [sys.executable, "-m", "edgeinfer"]


def _wait_for_port(port: int, process: subprocess.Popen[bytes], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise LinkError(f"mosquitto ended with {process.returncode}")
        with socket.socket() as probe:
            probe.settimeout(0.5)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise LinkError(f"mosquitto does not listen on port {port} after {timeout_s:g} s")
