"""Start a device daemon with the demo's models for a benchmark, and talk to it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgeinfer.client import Client
from edgeinfer.errors import EdgeInferError, LinkError
from edgeinfer_tools.sample_files import write_samples

MODELS = ("pp-ocr-det", "silero-vad", "support-intent")

_MODELS = Path(__file__).resolve().parents[2] / "models"

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
    """One daemon below `root`, without a broker."""

    def __init__(self, root: Path, bundles: Path, *, models: tuple[str, ...] = MODELS, extra_config: str = "") -> None:
        self.root = root
        self.bundles = bundles
        self.models = models
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
        """Install the bundles, start the daemon, wait until its models are ready; end it afterwards."""
        edgeinfer = [sys.executable, "-m", "edgeinfer"]
        for model in self.models:
            bundle = str(self.bundles / model)
            subprocess.run([*edgeinfer, "bundle", "add", bundle, "--state-dir", str(self.root / "state")],
                           check=True, capture_output=True, timeout=120)  # fmt: skip
        models = "".join(f'\n[[model]]\nname = "{model}"\n' for model in self.models)
        config = self.root / "device.toml"
        config.write_text(_CONFIG.format(root=self.root) + models + self._extra_config, encoding="utf-8")
        with (self.root / "daemon.log").open("wb") as log:
            self._process = subprocess.Popen([*edgeinfer, "run", "--config", str(config)], stdout=log, stderr=log)
        try:
            self._wait_until_ready()
            yield self
        finally:
            self._process.terminate()
            try:
                self._process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(timeout=5)

    def warm_up(self) -> None:
        """Have every model of the demo answer once, with real input."""
        frame = write_samples(_MODELS / "pp-ocr-det", self.root / "frames")[0]
        with Client(self.socket) as client:
            client.infer_text("support-intent", "hello", deadline_ms=5000)
            client.infer_file("pp-ocr-det", frame, deadline_ms=10_000)
            client.infer("silero-vad", {"audio": [[0.0] * 512]}, deadline_ms=5000)

    def status(self) -> dict[str, Any]:
        """Return the daemon's status document."""
        with Client(self.socket) as client:
            return client.status()

    def variants(self) -> dict[str, str]:
        """Return which variant of each model is loaded."""
        return {model["name"]: model["variant"] for model in self.status()["state"]["models"]}

    def _wait_until_ready(self, timeout_s: float = 60.0) -> None:
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(EdgeInferError, OSError):
                if self.status().get("ready"):
                    return
            time.sleep(0.1)
        log = (self.root / "daemon.log").read_text(encoding="utf-8", errors="replace")[-2000:]
        raise LinkError(f"the daemon is not ready after {timeout_s:g} s:\n{log}")
