"""Start a device daemon for a benchmark, and talk to it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeinfer.artifact.manifest import read_manifest
from edgeinfer.client import Client
from edgeinfer.errors import EdgeInferError, LinkError
from edgeinfer_tools.sample_files import write_samples

DEMO_MODELS = ("pp-ocr-det", "silero-vad", "support-intent")

_MODELS = Path(__file__).resolve().parents[2] / "models"
_EDGEINFER = [sys.executable, "-m", "edgeinfer"]

_CONFIG = """\
board = "generic-x86"

[device]
id = "bench"

[paths]
state_dir = "{root}/state"
socket = "{root}/edgeinfer.sock"

[thermal]
enabled = false
"""


class Service:
    """One daemon below `root`, without a broker, that holds the models of `bundles`.

    `keys` are further lines of a model's section, by the model's name.
    """

    def __init__(
        self, root: Path, bundles: Sequence[Path], *, keys: Mapping[str, str] | None = None, extra_config: str = ""
    ) -> None:
        self.root = root
        self._bundles = bundles
        self._keys = keys or {}
        self._extra_config = extra_config
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The daemon's."""
        assert self._process is not None
        return self._process.pid

    @property
    def socket(self) -> Path:
        """The daemon's UNIX socket."""
        return self.root / "edgeinfer.sock"

    @contextlib.contextmanager
    def running(self) -> Iterator[Service]:
        """Install, start, and wait until the models are ready; end the daemon afterwards."""
        self.install()
        with self.started():
            self.wait_until_ready()
            yield self

    def install(self) -> None:
        """Add the bundles to the daemon's store, and write its configuration."""
        sections = []
        for bundle in self._bundles:
            argv = [*_EDGEINFER, "bundle", "add", str(bundle), "--state-dir", str(self.root / "state")]
            subprocess.run(argv, check=True, capture_output=True, timeout=120)
            name = read_manifest(bundle)[0].name
            sections.append(f'\n[[model]]\nname = "{name}"\n{self._keys.get(name, "")}')
        config = _CONFIG.format(root=self.root) + "".join(sections) + self._extra_config
        (self.root / "device.toml").write_text(config, encoding="utf-8")

    @contextlib.contextmanager
    def started(self) -> Iterator[Service]:
        """Start the daemon and wait for nothing; end it afterwards."""
        argv = [*_EDGEINFER, "run", "--config", str(self.root / "device.toml")]
        with (self.root / "daemon.log").open("wb") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log)
        try:
            yield self
        finally:
            self._process.terminate()
            try:
                self._process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(timeout=5)

    def status(self) -> dict[str, Any]:
        """Return the daemon's status document."""
        with Client(self.socket) as client:
            return client.status()

    def variants(self) -> dict[str, str]:
        """Return which variant of each model is loaded."""
        return {model["name"]: model["variant"] for model in self.status()["state"]["models"]}

    def check_running(self) -> None:
        """Raise `LinkError` with the end of its log when the daemon has ended."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise LinkError(f"the daemon ended with status {self._process.returncode}:\n{self._log()}")

    def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        """Return once every model that it preloads is there.

        Raises:
            LinkError: it ended, or is not ready by then.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.check_running()
            with contextlib.suppress(EdgeInferError, OSError):
                if self.status().get("ready"):
                    return
            time.sleep(0.1)
        raise LinkError(f"the daemon is not ready after {timeout_s:g} s:\n{self._log()}")

    def _log(self) -> str:
        return (self.root / "daemon.log").read_text(encoding="utf-8", errors="replace")[-2000:]


def warm_up_demo(service: Service) -> None:
    """Have every model of the demo answer once, with real input."""
    frame = write_samples(_MODELS / "pp-ocr-det", service.root / "frames")[0]
    with Client(service.socket) as client:
        client.infer_text("support-intent", "hello", deadline_ms=5000)
        client.infer_file("pp-ocr-det", frame, deadline_ms=10_000)
        client.infer("silero-vad", {"audio": [[0.0] * 512]}, deadline_ms=5000)
