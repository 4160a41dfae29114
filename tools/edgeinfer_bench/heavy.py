"""What the way through the runtime costs a camera loop: frame to delivered result, against raw `session.run`.

The frames come from a child process over a pipe, as a camera's would from ffmpeg. The loop's clock starts when the
daemon has the frame's bytes (capture) and stops when the result is handed to the sink: queueing, the way into the
worker, JPEG decoding, the run, the way back. The raw side times `session.run` alone, and JPEG decoding apart, in a bare
process with the same thread count. Both take turns, frame by frame, in changing order.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

from edgeinfer.artifact.manifest import read_manifest
from edgeinfer_bench.bare import BareProcess
from edgeinfer_bench.quantile import percentile
from edgeinfer_bench.record import Figure
from edgeinfer_bench.service import Service
from edgeinfer_tools.sample_files import write_samples

MODEL = "pp-ocr-det"
FRAMES = 100
_RECIPE = Path(__file__).resolve().parents[2] / "models" / MODEL
_TIMEOUT_S = 10.0

_LOOP = """
[[loop]]
name = "heavy"
model = "pp-ocr-det"
source = {{ kind = "command", argv = ["cat", "{root}/camera"], framing = "length", content_type = "image/jpeg" }}
period = "1 ms"
deadline = "5 s"
firm = true
sinks = [{{ kind = "jsonl", path = "{root}/heavy.jsonl" }}]
"""


def measure_heavy(bundles: Path) -> tuple[dict[str, str], list[Figure]]:
    """Return the model's digest and the figures; takes about a minute."""
    manifest, digest = read_manifest(bundles / MODEL)
    with tempfile.TemporaryDirectory(prefix="edgeinfer-bench-") as folder:
        root = Path(folder)
        frames = write_samples(_RECIPE, root / "frames")
        os.mkfifo(root / "camera")
        service = Service(root, [bundles / MODEL], extra_config=_LOOP.format(root=root))
        with service.running(), (root / "camera").open("wb", buffering=0) as camera:
            loop = _Loop(root / "heavy.jsonl", camera.fileno())
            variant = loop.send(frames[0])["variant"]
            model = bundles / MODEL / manifest.variant(variant).file
            pairs, records = _take_turns(loop, model, frames)
    return {MODEL: digest}, _figures(pairs, [record["latency_ms"] for record in records], variant)


def _take_turns(loop: _Loop, model: Path, frames: list[Path]) -> tuple[list[tuple[int, int]], list[dict[str, Any]]]:
    pairs: list[tuple[int, int]] = []
    records: list[dict[str, Any]] = []
    with BareProcess.running(model, {}, frames) as raw:
        for number in range(FRAMES):
            pick = number % len(frames)
            if number % 2:
                pairs += raw.run([pick])
            records.append(loop.send(frames[pick]))
            if not number % 2:
                pairs += raw.run([pick])
    return pairs, records


class _Loop:
    """The daemon's loop, from the camera's side of the pipe to the sink's file."""

    def __init__(self, sink: Path, camera: int) -> None:
        self._sink = sink
        self._camera = camera
        self._read_bytes = 0

    def send(self, frame: Path) -> dict[str, Any]:
        """Give the loop one frame and return its record.

        Raises:
            RuntimeError: it was not answered, or not well.
        """
        data = frame.read_bytes()
        view = memoryview(struct.pack("<I", len(data)) + data)
        while view:
            view = view[os.write(self._camera, view) :]
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            if self._sink.exists() and self._sink.stat().st_size > self._read_bytes:
                with self._sink.open("rb") as file:
                    file.seek(self._read_bytes)
                    line = file.readline()
                if line.endswith(b"\n"):
                    self._read_bytes += len(line)
                    record: dict[str, Any] = json.loads(line)
                    if record["outcome"] != "ok":
                        raise RuntimeError(f"{frame.name} ended {record['outcome']} ({record['reason']})")
                    return record
            time.sleep(0.005)
        raise RuntimeError(f"the loop did not answer {frame.name} within {_TIMEOUT_S:g} s")


def _figures(pairs: list[tuple[int, int]], latencies: list[dict[str, float]], variant: str) -> list[Figure]:
    raw_ms = [ran / 1e6 for _, ran in pairs]
    decoded_ms = [(decode + ran) / 1e6 for decode, ran in pairs]
    total_ms = [latency["total"] for latency in latencies]
    run_ms = [latency["run"] for latency in latencies]
    phases = {name: percentile([latency[name] for latency in latencies], 50) for name in ("wait", "decode", "post")}
    where = ", ".join(f"{name} {value:.2f}" for name, value in phases.items())
    runs = len(pairs)

    def ratio(name: str, ours: list[float], theirs: list[float], percent: float, note: str) -> Figure:
        value = percentile(ours, percent) / percentile(theirs, percent)
        return Figure(f"overhead.heavy.{name}", value, "x", None, "lower", peer="raw", runs=runs, note=note)

    everything = f"capture to delivery, JPEG decoding included; raw: session.run; {variant}"
    return [
        ratio("p50_ratio", total_ms, raw_ms, 50, f"{everything}; p50 of phases in ms: {where}"),
        ratio("p99_ratio", total_ms, raw_ms, 99, everything),
        ratio("decoding_raw.p50_ratio", total_ms, decoded_ms, 50, "as above; raw: JPEG decoding and session.run"),
        ratio("run_only.p50_ratio", run_ms, raw_ms, 50, "session.run inside the worker; raw: session.run"),
        Figure("overhead.heavy.raw_p50_ms", percentile(raw_ms, 50), "ms", None, "lower", runs=runs),
    ]
