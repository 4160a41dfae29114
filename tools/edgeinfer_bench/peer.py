"""The peer: MLServer with ONNX Runtime, in a virtual environment of its own, made on first use.

It serves the same ONNX files with the same session options (one thread, spinning off, telemetry off), at its fair best:
no access log, no metrics server, no compression, runs in a thread beside the event loop, so that requests are read
while another one runs. Requests are JSON tensors: it answers 422 to binary ones. uvloop is held back, because with
0.22 and newer its parallel workers die at their start.

What cannot be installed or does not start is `PeerMissing`, with the reason; the figures beside it are null then.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgeinfer_bench.bare import Feeds

REQUIREMENTS: Final = ("mlserver==1.7.1", "onnxruntime==1.32.0", "uvloop==0.21.0")
TITLE: Final = "MLServer 1.7.1"
MODES: Final = (0, 1)
"""Settings of `parallel_workers` that are tried: all in one process, or the model in another one."""

_ENVIRONMENT: Final = Path(__file__).resolve().parents[2] / "build" / "peers" / "mlserver"
_INSTALL_TIMEOUT_S: Final = 400.0
_START_TIMEOUT_S: Final = 40.0
_STOP_TIMEOUT_S: Final = 15.0

_RUNTIME: Final = """
import asyncio
from concurrent.futures import ThreadPoolExecutor
import numpy as np, onnxruntime as ort
from mlserver import MLModel
from mlserver.types import InferenceResponse, ResponseOutput

TYPES = {"FP32": np.float32, "INT64": np.int64}
NAMES = {np.dtype(kind): name for name, kind in TYPES.items()}
core = ThreadPoolExecutor(1)

class Onnx(MLModel):
    async def load(self):
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        for kind in ("intra", "inter"):
            options.add_session_config_entry(f"session.{kind}_op.allow_spinning", "0")
        path = self.settings.parameters.uri
        self.loaded = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.found_names = [output.name for output in self.loaded.get_outputs()]
        return True

    async def predict(self, request):
        feeds = {
            tensor.name: np.array(tensor.data.root, TYPES[tensor.datatype]).reshape(tensor.shape)
            for tensor in request.inputs
        }
        found = await asyncio.get_running_loop().run_in_executor(core, self.loaded.run, None, feeds)
        outputs = [
            ResponseOutput(name=name, shape=list(value.shape), datatype=NAMES[value.dtype], data=value.ravel().tolist())
            for name, value in zip(self.found_names, found)
        ]
        return InferenceResponse(model_name=self.name, outputs=outputs)
"""


class PeerMissing(Exception):
    """The peer cannot be had here; the text says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A running server that answers for every model it was given."""

    pid: int
    port: int


def environment(folder: Path = _ENVIRONMENT, requirements: tuple[str, ...] = REQUIREMENTS) -> Path:
    """Return the folder of the peer's virtual environment, made now unless it is there for these requirements.

    Raises:
        PeerMissing: it cannot be made: no network, no index, no disk.
    """
    wanted = "\n".join(requirements)
    marker = folder / "installed"
    if marker.is_file() and marker.read_text(encoding="utf-8") == wanted:
        return folder
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for argv in ([sys.executable, "-m", "venv", "--clear", str(folder)], [*pip, *requirements]):
        try:
            done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerMissing(f"{requirements[0]} could not be installed: {error}") from error
        if done.returncode:
            raise PeerMissing(f"{requirements[0]} could not be installed: {last_words(done.stderr or done.stdout)}")
    marker.write_text(wanted, encoding="utf-8")
    return folder


@contextlib.contextmanager
def running(models: Mapping[str, Path], *, parallel_workers: int) -> Iterator[Peer]:
    """Serve the ONNX files by these names until the end of the body; ready when it starts.

    Raises:
        PeerMissing: it cannot be installed, or does not get ready.
    """
    program = environment() / "bin" / "mlserver"
    with tempfile.TemporaryDirectory(prefix="edgeinfer-peer-") as name:
        folder, (port, other) = Path(name), _free_ports()
        _write_repository(folder, models, server_settings(port, other, parallel_workers))
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [str(program), "start", str(folder)],
                cwd=folder,
                stdout=log,
                stderr=log,
                process_group=0,  # its workers end with it, also when it has to be killed
                env={**os.environ, "ORT_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        try:
            _wait_until_ready(process, port, folder / "log", models)
            yield Peer(process.pid, port)
        finally:
            _stop(process)


def request(model: str, feeds: Feeds, *, keep_alive: bool = True) -> bytes:
    """Return a whole HTTP request that asks for zeros in the shortest JSON there is."""
    tensors = []
    for name, (kind, shape) in feeds.items():
        count = 1
        for size in shape:
            count *= size
        tensors.append({"name": name, "shape": list(shape), "datatype": _DATATYPES[kind], "data": [0] * count})
    body = json.dumps({"inputs": tensors}, separators=(",", ":")).encode()
    head = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n" + ("" if keep_alive else "Connection: close\r\n") + "\r\n"
    )
    return head.encode() + body


_DATATYPES: Final = {"float32": "FP32", "int64": "INT64"}


def ask(peer: Peer, model: str, feeds: Feeds) -> None:
    """Ask once.

    Raises:
        PeerMissing: it does not answer well.
    """
    try:
        with socket.create_connection(("127.0.0.1", peer.port), timeout=10) as connection:
            connection.sendall(request(model, feeds, keep_alive=False))
            with connection.makefile("rb") as reader:
                reply = reader.read()
    except OSError as error:
        raise PeerMissing(f"{TITLE} does not answer: {error}") from error
    status = reply.split(b"\r\n", 1)[0].decode("latin-1")
    if " 200 " not in f"{status} ":
        raise PeerMissing(f"{TITLE} answers {status} for {model}: {reply[-200:].decode('utf-8', 'replace')}")


def server_settings(port: int, grpc_port: int, parallel_workers: int) -> dict[str, object]:
    """Return the settings that differ from the server's defaults."""
    return {
        "debug": False,
        "host": "127.0.0.1",
        "http_port": port,
        "grpc_port": grpc_port,
        "metrics_endpoint": None,
        "gzip_enabled": False,
        "parallel_workers": parallel_workers,
    }


def last_words(text: str) -> str:
    """Return the last line that names an error, else the last one that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1][:300]


def _write_repository(folder: Path, models: Mapping[str, Path], settings: Mapping[str, object]) -> None:
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    for name, path in models.items():
        place = folder / name
        place.mkdir()
        (place / "onnx_model.py").write_text(_RUNTIME, encoding="utf-8")
        model = {"name": name, "implementation": "onnx_model.Onnx", "parameters": {"uri": str(path.resolve())}}
        (place / "model-settings.json").write_text(json.dumps(model), encoding="utf-8")


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path, models: Mapping[str, Path]) -> None:
    paths = ["v2/health/ready", *(f"v2/models/{name}/ready" for name in models)]
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(urllib.error.URLError, OSError):
            for path in paths:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=2).close()
            return
        time.sleep(0.1)
    said = last_words(log.read_text(encoding="utf-8", errors="replace"))
    state = "is not ready" if process.poll() is None else f"ended with status {process.returncode}"
    raise PeerMissing(f"{TITLE} {state}: {said}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its workers."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=5)
