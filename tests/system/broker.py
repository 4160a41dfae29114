"""A real mosquitto for tests: its own process, port and folder; it can be stopped, restarted and frozen.

Use the `broker` fixture (function scope), or `Broker` directly for other settings:

    with Broker(tmp_path, ["max_packet_size 2000"]) as broker:
        connect("127.0.0.1", broker.port)

The port stays the same over `stop` and `start`. Nothing persists over a restart unless the settings say so.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from edgeinfer.config import BrokerSection

_START_TIMEOUT_S = 10.0


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Broker:
    """One mosquitto process on 127.0.0.1."""

    def __init__(
        self, folder: Path, settings: Sequence[str] = (), *, port: int | None = None, anonymous: bool = True
    ) -> None:
        self.port = port or free_port()
        self.folder = folder
        self._log = folder / f"mosquitto-{self.port}.log"
        self._config = folder / f"mosquitto-{self.port}.conf"
        lines = [
            f"listener {self.port} 127.0.0.1",
            f"allow_anonymous {'true' if anonymous else 'false'}",
            "set_tcp_nodelay true",  # else 42 ms a side at QoS 1
            "max_queued_messages 1000",
            f"log_dest file {self._log}",
            "log_type all",
            *(["user root"] if os.getuid() == 0 else []),
            *settings,
        ]
        self._config.write_text("\n".join(lines) + "\n")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the running broker."""
        assert self._process is not None, "the broker is not running"
        return self._process.pid

    def section(self, **changes: object) -> BrokerSection:
        """Return the configuration of a link to it."""
        return BrokerSection(**{"host": "127.0.0.1", "port": self.port, **changes})  # type: ignore[arg-type]

    def start(self) -> None:
        """Start it and wait until it listens."""
        program = shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
        assert program is not None, "mosquitto is not installed: apt-get install mosquitto"
        self._process = subprocess.Popen([program, "-c", str(self._config)], stderr=subprocess.PIPE)
        end = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                stderr = self._process.stderr.read().decode() if self._process.stderr else ""
                raise RuntimeError(f"mosquitto ended with {self._process.returncode}: {stderr}{self.log()}")
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.01)
        raise RuntimeError(f"mosquitto does not listen on {self.port} after {_START_TIMEOUT_S} s: {self.log()}")

    def stop(self) -> None:
        """End it as an operator would; clients see their connection close. Does nothing when it isn't running."""
        if (process := self._process) is None:
            return
        self._process = None
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stderr:
            process.stderr.close()

    def restart(self) -> None:
        """Stop and start it: subscriptions and retained messages are gone."""
        self.stop()
        self.start()

    def freeze(self) -> None:
        """Suspend the process: connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume after `freeze`."""
        os.kill(self.pid, signal.SIGCONT)

    def log(self) -> str:
        """Return what the broker logged so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """A running broker for one test. Import it into the test module or a conftest."""
    with Broker(tmp_path) as running:
        yield running
