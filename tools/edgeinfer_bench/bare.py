"""The yardstick: one bare Python process with onnxruntime and one model, as somebody would write it in ten lines.

One thread, spinning off, telemetry off, no runtime around it. It runs only when it is told to, so that it can take
turns with what stands beside it, and times `session.run` alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

_SCRIPT = """
import json, sys, time
import numpy as np, onnxruntime as ort
path, feeds, images = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:]
options = ort.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
for kind in ("intra", "inter"):
    options.add_session_config_entry(f"session.{kind}_op.allow_spinning", "0")
begun = time.perf_counter_ns()
session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
made = time.perf_counter_ns() - begun
zeros = {name: np.zeros(shape, dtype) for name, (dtype, shape) in feeds.items()}
if images:
    from PIL import Image
def run(pick):
    begun = time.perf_counter_ns()
    if images:
        zeros["image"] = np.asarray(Image.open(images[pick]).convert("RGB"))[None]
    decoded = time.perf_counter_ns()
    session.run(None, zeros)
    return decoded - begun, time.perf_counter_ns() - decoded
run(0)
print(made, flush=True)
for line in sys.stdin:
    print(*(f"{decode},{ran}" for decode, ran in [run(int(word)) for word in line.split()]), flush=True)
"""

Feeds = Mapping[str, tuple[str, Sequence[int]]]
"""Graph inputs by name: numpy type and shape of the zeros that are fed."""


class BareProcess:
    """One such process; it has run once when it is there. Images, when given, replace the zeros of input `image`."""

    def __init__(self, process: subprocess.Popen[str], session_ns: int, cold_ns: int) -> None:
        self._process = process
        self.session_ns = session_ns
        """What making the session took."""
        self.cold_ns = cold_ns
        """From exec to the first result."""

    @classmethod
    @contextlib.contextmanager
    def running(cls, model: Path, feeds: Feeds, images: Sequence[Path] = ()) -> Iterator[Self]:
        """Start the process and wait until it has run once.

        Raises:
            RuntimeError: it does not run the model.
        """
        argv = [sys.executable, "-c", _SCRIPT, str(model), json.dumps(feeds), *map(str, images)]
        begun_ns = time.monotonic_ns()
        with subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **_ENVIRONMENT}
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            made = process.stdout.readline()
            cold_ns = time.monotonic_ns() - begun_ns
            if not made:
                raise RuntimeError(f"{model} does not run in a bare process")
            yield cls(process, int(made), cold_ns)
            process.stdin.close()
            process.wait(timeout=30)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def run(self, picks: Sequence[int] = (0,)) -> list[tuple[int, int]]:
        """Run once per pick (which image) and return the nanoseconds of decoding and of `session.run`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, picks)) + "\n")
        self._process.stdin.flush()
        pairs = (word.split(",") for word in self._process.stdout.readline().split())
        found = [(int(decode), int(ran)) for decode, ran in pairs]
        if len(found) != len(picks):
            raise RuntimeError("the bare process ended")
        return found


_ENVIRONMENT = {"ORT_DISABLE_TELEMETRY": "1"}
