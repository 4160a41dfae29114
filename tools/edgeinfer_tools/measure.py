"""Measure a variant in throw-away processes: load time, latency percentiles, memory.

The parent's half: starts `measuring` once per thread count, so that a crash, a leak or a grown heap of one
measurement touches nothing else, and turns what comes back into the manifest's and the profile's terms.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.artifact.board import Board
from edgeinfer.artifact.manifest import StateSpec
from edgeinfer.artifact.profile import Latency, OperatingCost
from edgeinfer.errors import SessionError
from edgeinfer_tools.samples import Array

TIMEOUT_S = 300
HEADROOM = 1.1
"""On the memory peak: sampling may miss the top, and another allocator rounds differently."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that measured."""

    cpu: str
    flags: list[str]
    cores: int
    """That this process may use."""


def this_machine(proc: Path = Path("/proc")) -> Machine:
    """Read CPU name and flags of this machine."""
    fields: dict[str, str] = {}
    for line in (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    name = fields.get("model name") or fields.get("model") or platform.machine()
    flags = (fields.get("flags") or fields.get("features") or "").split()
    return Machine(cpu=name, flags=sorted(flags), cores=len(os.sched_getaffinity(0)))


def thread_counts(board: Board, machine: Machine) -> list[int]:
    """Return 1 and the powers of two up to the board's cores, as far as this machine has them."""
    most = min(board.cpu.cores, machine.cores)
    return sorted({1, most, *(1 << k for k in range(1, 8) if 1 << k <= most)})


def smoke(model: Path, inputs: dict[str, Array], state: list[StateSpec]) -> None:
    """Load and run the model in a throw-away process, with and without graph optimisation.

    Raises:
        SessionError: it cannot be loaded or run, or the process died of it.
    """
    _child(model, state, {"typical": inputs}, mode="smoke", threads=1, seconds=0.0)


def measure(model: Path, *, variant: str, threads: int, typical: dict[str, Array], largest: dict[str, Array],
            state: list[StateSpec], seconds: float) -> OperatingCost:  # fmt: skip
    """Return what one variant costs here at one thread count.

    Latency is that of `typical`; memory is that of loading and then running `largest` too.

    Raises:
        SessionError: as `smoke`.
    """
    found = _child(model, state, {"typical": typical, "largest": largest}, mode="measure", threads=threads, seconds=seconds)
    micros = np.array(found["latency_us"])
    quantile = {q: round(float(np.quantile(micros, q / 100))) for q in (50, 90, 99)}
    peak = max(found["peak_bytes"], found["steady_bytes"])
    return OperatingCost(
        variant=variant,
        provider="CPUExecutionProvider",
        threads=threads,
        latency=Latency(
            p50_us=max(1, quantile[50]),
            p90_us=max(1, quantile[90]),
            p99_us=max(1, quantile[99]),
            mean_us=max(1, round(float(micros.mean()))),
            runs=len(micros),
        ),
        load_ms=round(found["load_ms"], 3),
        load_peak_bytes=_round_up(peak * HEADROOM),
        steady_bytes=_round_up(found["steady_bytes"]),
        cpu_us_per_run=round(found["cpu_us_per_run"]),
    )


def _round_up(size_bytes: float) -> int:
    """To whole 64 KiB."""
    return -(-int(size_bytes) // 65536) * 65536


def _child(model: Path, state: list[StateSpec], inputs: dict[str, dict[str, Array]], *, mode: str, threads: int,
           seconds: float) -> dict[str, Any]:  # fmt: skip
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder) / "inputs.npz"
        flat = {f"{kind}/{name}": array.astype(str) if array.dtype == np.object_ else array
                for kind, tensors in inputs.items() for name, array in tensors.items()}  # fmt: skip
        with arrays.open("wb") as file:
            np.savez(file, **flat)  # type: ignore[arg-type]
        order = {"model": str(model), "inputs": str(arrays), "mode": mode, "threads": threads, "seconds": seconds,
                 "state": [[spec.input, spec.output, spec.datatype, spec.shape] for spec in state]}  # fmt: skip
        try:
            done = subprocess.run([sys.executable, "-m", "edgeinfer_tools.measuring", json.dumps(order)], env=environment,
                                  capture_output=True, text=True, timeout=TIMEOUT_S, check=False)  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise SessionError("timeout", f"{model.name} did not load and run in {TIMEOUT_S} s") from error
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        last = done.stderr.strip().splitlines()[-1:] or [""]
        raise SessionError("crashed", f"loading or running {model.name} ended the process with {how}: {last[0]}") from None
    if "error" in found:
        raise SessionError(found["reason"], f"{model.name}: {found['error']}")
    return found
