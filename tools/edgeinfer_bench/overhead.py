"""What the way through the runtime costs: the heavy loop end to end against raw `session.run` on the same frames.

The loop's clock starts when the daemon has the frame's bytes (capture) and stops when the result is delivered to the
sink: queueing, the way into the worker, JPEG decoding, the run, the way back. The raw side decodes beforehand and
times `session.run` alone, in a bare process with the same thread count. Both take turns within one run, a block of
frames each, on the same machine state. The share of JPEG decoding, which the raw side doesn't pay, is shown apart.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from edgeinfer.artifact.manifest import read_manifest
from edgeinfer_bench.record import Figure, Record
from edgeinfer_bench.service import Service
from edgeinfer_tools.sample_files import write_samples

MODEL = "pp-ocr-det"
BLOCKS = 10
FRAMES_PER_BLOCK = 12
_RECIPE = Path(__file__).resolve().parents[2] / "models" / MODEL

_LOOP = """
[[loop]]
name = "heavy"
model = "pp-ocr-det"
source = {{ kind = "directory", path = "{root}/inbox", mode = "watch" }}
period = "10 ms"
deadline = "5 s"
firm = true
sinks = [{{ kind = "jsonl", path = "{root}/heavy.jsonl" }}]
"""

_RAW = """
import sys, time
import numpy as np, onnxruntime as ort
from PIL import Image
options = ort.SessionOptions()
options.intra_op_num_threads = 1
options.inter_op_num_threads = 1
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
name = session.get_inputs()[0].name
frames = [np.asarray(Image.open(path).convert("RGB"))[None] for path in sys.argv[2:]]
session.run(None, {name: frames[0]})
print("ready", flush=True)
for line in sys.stdin:
    for index in map(int, line.split()):
        begun = time.perf_counter_ns()
        session.run(None, {name: frames[index]})
        print(time.perf_counter_ns() - begun, flush=True)
"""


def measure(bundles: Path) -> Record:
    """Return the record; takes about a minute."""
    manifest, digest = read_manifest(bundles / MODEL)
    with tempfile.TemporaryDirectory(prefix="edgeinfer-bench-") as folder:
        root = Path(folder)
        frames = write_samples(_RECIPE, root / "frames")
        (root / "inbox").mkdir()
        service = Service(root, bundles, models=(MODEL,), extra_config=_LOOP.format(root=root))
        model = bundles / MODEL / manifest.variants[0].file
        argv = [sys.executable, "-c", _RAW, str(model), *map(str, frames)]
        with (
            service.running(),
            subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as raw,
        ):
            assert raw.stdout is not None
            if raw.stdout.readline() != "ready\n":
                raise RuntimeError("the raw session did not start")
            _through_loop(service, frames[:2])  # warm up
            raw_ns: list[int] = []
            records: list[dict[str, Any]] = []
            for block in range(BLOCKS):
                picks = [(block * FRAMES_PER_BLOCK + offset) % len(frames) for offset in range(FRAMES_PER_BLOCK)]
                raw_ns += _through_raw(raw, picks)
                records += _through_loop(service, [frames[pick] for pick in picks])
            assert raw.stdin is not None
            raw.stdin.close()
    return _record(digest, raw_ns, records)


def _through_raw(raw: subprocess.Popen[str], picks: list[int]) -> list[int]:
    assert raw.stdin is not None
    assert raw.stdout is not None
    raw.stdin.write(" ".join(map(str, picks)) + "\n")
    raw.stdin.flush()
    return [int(raw.stdout.readline()) for _ in picks]


def _through_loop(service: Service, frames: list[Path]) -> list[dict[str, Any]]:
    """Give the loop one frame after the other, each when the one before is done, and return their records."""
    inbox, sink = service.root / "inbox", service.root / "heavy.jsonl"
    before = len(service.records("heavy.jsonl")) if sink.exists() else 0
    for number, frame in enumerate(frames):
        name = f"{before + number:06d}{frame.suffix}"
        part = inbox / f"{name}.part"
        shutil.copyfile(frame, part)
        os.rename(part, inbox / name)  # noqa: PTH104  # atomic: the loop sees the whole frame or none
        deadline = time.monotonic() + 10
        while not sink.exists() or sink.read_bytes().count(b"\n") < before + number + 1:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the loop did not answer {name} within 10 s")
            time.sleep(0.01)
    found = service.records("heavy.jsonl")[before:]
    if wrong := [record for record in found if record["outcome"] != "ok"]:
        raise RuntimeError(f"{len(wrong)} of {len(found)} frames were not answered: {wrong[0]}")
    return found


def _record(digest: str, raw_ns: list[int], records: list[dict[str, Any]]) -> Record:
    raw_ms = [value / 1e6 for value in raw_ns]
    total_ms = [record["latency_ms"]["total"] for record in records]
    run_ms = [record["latency_ms"]["run"] for record in records]
    decode_ms = [record["latency_ms"]["decode"] for record in records]
    rest_ms = [total - decode for total, decode in zip(total_ms, decode_ms, strict=True)]
    runs = len(raw_ms)

    def ratio(name: str, values: list[float], percent: float, goal: float | None = None, note: str = "") -> Figure:
        value = percentile(values, percent) / percentile(raw_ms, percent)
        return Figure(name, value, "x", goal, "lower", peer="raw session.run", runs=runs, note=note)

    return Record(
        bench="overhead",
        workload={
            "model": {MODEL: digest},
            "threads": 1,
            "concurrency": 1,
            "clock": "loop: capture to delivery, JPEG decoding included; raw: session.run on decoded frames",
        },
        figures=[
            ratio("overhead.heavy.p50_ratio", total_ms, 50, note="end to end, JPEG decoding included"),
            ratio("overhead.heavy.p99_ratio", total_ms, 99, note="end to end, JPEG decoding included"),
            ratio("overhead.heavy.without_decode.p50_ratio", rest_ms, 50, note="end to end, less JPEG decoding"),
            ratio("overhead.heavy.run_only.p50_ratio", run_ms, 50, note="session.run inside the worker"),
            Figure("overhead.heavy.raw_p50_ms", percentile(raw_ms, 50), "ms", None, "lower", runs=runs),
            Figure("overhead.heavy.decode_p50_ms", percentile(decode_ms, 50), "ms", None, "lower", runs=runs),
        ],
    )


def percentile(values: list[float], percent: float) -> float:
    """Return the percentile by nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
