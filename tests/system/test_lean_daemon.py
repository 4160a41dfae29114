"""The daemon's own process never loads what needs memory by the dozen megabytes: not at the start, not at work."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeinfer.client import Client
from tests.system.broker import Broker

pytestmark = [pytest.mark.system, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "build" / "bundles" / "support-intent"
HEAVY = frozenset({"numpy", "onnxruntime", "onnx", "PIL", "torch", "optimum", "transformers", "scipy", "rich"})
SENTENCE = "I was charged twice for my invoice"
IMPORTED = re.compile(r"^import time:\s+\d+ \|\s+\d+ \|\s+(\S+)$", re.MULTILINE)


class Running:
    """A daemon as systemd would start it, with every import it makes written down."""

    def __init__(self, folder: Path, broker: Broker) -> None:
        assert BUNDLE.is_dir(), "build/bundles/support-intent is missing: run `make bundles`"
        texts = folder / "texts"
        texts.mkdir()
        (texts / "a.txt").write_text(SENTENCE)
        self.socket, self.config, self.log = folder / "e.sock", folder / "device.toml", folder / "log"
        self.config.write_text(f"""
board = "generic-x86"
[device]
id = "lean"
[paths]
state_dir = "{folder / "state"}"
socket = "{self.socket}"
[telemetry]
report_period = "200 ms"
[mqtt.site]
host = "127.0.0.1"
port = {broker.port}
[[model]]
name = "support-intent"
[[loop]]
name = "texts"
model = "support-intent"
source = {{ kind = "directory", path = "{texts}" }}
period = "100 ms"
deadline = "500 ms"
scope = "site"
sinks = [{{ kind = "mqtt" }}, {{ kind = "jsonl", path = "{folder / "results.jsonl"}" }}]
""")
        subprocess.run(
            [sys.executable, "-m", "edgeinfer", "bundle", "add", str(BUNDLE), "--state-dir", str(folder / "state")],
            check=True, cwd=ROOT, timeout=60, capture_output=True,
        )  # fmt: skip
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(folder / "notify"))
        self.manager.settimeout(30)
        environ = {**os.environ, "NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "4000000"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-X", "importtime", "-m", "edgeinfer", "run", "--config", str(self.config)],
                cwd=ROOT, env=environ, stderr=log, stdout=log,
            )  # fmt: skip

    def wait_for(self, word: str) -> list[str]:
        """Return what systemd would have been told until a message with `word` came."""
        messages: list[str] = []
        while not (messages and word in messages[-1]):
            messages.append(self.manager.recv(4096).decode())
        return messages

    def children(self) -> list[int]:
        """Return the process ids of zygote and workers."""
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in pids]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


@pytest.fixture
def running(broker: Broker, tmp_path: Path) -> Iterator[Running]:
    daemon = Running(tmp_path, broker)
    yield daemon
    daemon.process.kill()
    daemon.process.wait()
    daemon.manager.close()


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_the_daemon_stays_lean_while_it_does_everything(running: Running) -> None:
    before_ready = running.wait_for("READY=1")
    assert any(message.startswith("EXTEND_TIMEOUT_USEC=") for message in before_ready)
    with Client(running.socket) as client:
        answer = client.infer_text("support-intent", SENTENCE, deadline_ms=2000)
        end = time.monotonic() + 10
        while client.status()["report"]["total"]["ok"] < 10 and time.monotonic() < end:
            time.sleep(0.05)
        report = client.status()["report"]
    assert report["total"]["ok"] >= 10
    assert report["balanced"] is True
    assert answer is not None
    assert "WATCHDOG=1" in running.wait_for("WATCHDOG=1")

    loaded = "onnxruntime"
    assert loaded not in maps(running.process.pid)
    assert "numpy" not in maps(running.process.pid)
    assert "libcrypto" not in maps(running.process.pid), "nothing is encrypted here, and files are hashed elsewhere"
    assert any(loaded in maps(pid) for pid in running.children()), "the workers are where it belongs"

    assert running.stop() == 0
    assert any(message.startswith("STOPPING=1") for message in running.wait_for("STOPPING=1"))
    log = running.log.read_text()
    imported = {name.split(".")[0] for name in IMPORTED.findall(log)}
    assert {"asyncio", "msgspec", "paho", "edgeinfer"} <= imported, "the record of imports is there"
    assert imported & HEAVY == set()
    assert "Traceback" not in log
