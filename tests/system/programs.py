"""Our programs as real processes, for system tests: a device daemon, a nearby service, and the command line."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from edgeinfer.client import Client

ROOT = Path(__file__).parents[2]
BUNDLES = ROOT / "build" / "bundles"
SENTENCE = "I was charged twice for my invoice"
_PATIENCE_S = 20.0


def edgeinfer(*arguments: str | Path, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        [sys.executable, "-m", "edgeinfer", *map(str, arguments)],
        capture_output=True, text=True, timeout=60, cwd=ROOT, env={**os.environ, **(environ or {})}, check=False,
    )  # fmt: skip


def wait_until(happened: Callable[[], object], what: str, seconds: float = _PATIENCE_S) -> None:
    """Wait until something outside of this process has happened."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def running_pids(pids: Sequence[int]) -> list[int]:
    """Return those processes that still run."""
    alive = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}:
                alive.append(pid)
    return alive


class Program:
    """One of our services, started as systemd would; killed at the end of the `with` whatever the test did."""

    verb = "run"

    def __init__(
        self,
        folder: Path,
        config: str,
        *,
        environ: dict[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.state_dir, self.socket = folder / "state", folder / "e.sock"
        self.config, self._log = folder / "config.toml", folder / "log"
        self.config.write_text(self.preamble() + config)
        self._environ = environ or {}
        self._wrapper = list(wrapper)
        self._manager: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def preamble(self) -> str:
        return f"""
board = "generic-x86"
device.id = "{self.folder.name}"
device.site = "lab"
paths.state_dir = "{self.state_dir}"
paths.socket = "{self.socket}"
telemetry.report_period = "200 ms"
"""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._manager is not None:
            self._manager.close()
        if error is not None:
            print(self.log()[-8000:])

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """Start it; `ready` waits for what it says."""
        notify = self.folder / "notify"
        notify.unlink(missing_ok=True)
        self._manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._manager.bind(str(notify))
        self._manager.settimeout(_PATIENCE_S)
        environ = {**os.environ, "NOTIFY_SOCKET": str(notify), **self._environ}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._wrapper, sys.executable, "-m", "edgeinfer", self.verb, "--config", str(self.config)],
                cwd=ROOT, env=environ, stdout=log, stderr=log,
            )  # fmt: skip

    def told(self, word: str) -> list[str]:
        """Return what systemd is told until a message with `word` comes."""
        assert self._manager is not None
        messages: list[str] = []
        while not (messages and word in messages[-1]):
            try:
                messages.append(self._manager.recv(4096).decode())
            except TimeoutError:
                raise AssertionError(f"no {word} among {messages}") from None
        return messages

    def ready(self) -> Self:
        """Start it and wait until it says that it is ready."""
        self.start()
        self.told("READY=1")
        return self

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
        """Send a signal; return the exit status and how many seconds the end took."""
        began = time.monotonic()
        self.process.send_signal(number)
        return self.process.wait(30), time.monotonic() - began

    def ended(self) -> int:
        """Wait for its end and return the exit status."""
        return self.process.wait(30)

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def children(self) -> list[int]:
        """Return the process ids of zygote and workers: all are its children."""
        return [int(pid) for pid in Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()]

    def zygote(self) -> int:
        return int(re.findall(r"zygote ready pid=(\d+)", self.log())[-1])

    @property
    def _pid(self) -> int:
        return self.process.pid

    def client(self) -> Client:
        return Client(self.socket)

    def ask(self, text: str = SENTENCE, *, model: str = "support-intent", **options: Any) -> Any:
        """Return the answer of a text model."""
        with self.client() as client:
            return client.infer_text(model, text, **{"deadline_ms": 5000, **options})

    def status(self) -> dict[str, Any]:
        with self.client() as client:
            return client.status()

    def models(self) -> dict[str, dict[str, Any]]:
        """Return how each model stands."""
        return {model["name"]: model for model in self.status()["state"]["models"]}

    def model_state(self, name: str = "support-intent") -> str:
        return str(self.models()[name]["state"])


class NearbyProgram(Program):
    """The nearby service."""

    verb = "nearby"

    def preamble(self) -> str:
        return f"""
name = "{self.folder.name}"
site = "lab"
state_dir = "{self.state_dir}"
advert_period = "200 ms"
"""


def give_bundles(program: Program, store: Path) -> None:
    """Copy an installed store, so that each test may do with it what it likes."""
    shutil.copytree(store, program.state_dir)
