"""The child's half of measuring: run as `python -m edgeinfer_tools.measuring ORDER`, print one line of JSON.

Imports ONNX Runtime and forks, as the device's zygote does, and measures the forked process: so its memory is what one
more worker adds. The first process only watches the anonymous memory of the second.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from edgeinfer.artifact.manifest import StateSpec
from edgeinfer.errors import SessionError
from edgeinfer_tools.samples import Array

MIN_RUNS = 20
MAX_RUNS = 400
WARM_UP = 3


def main() -> None:
    """Carry out the order in argv."""
    order = json.loads(sys.argv[1])
    from edgeinfer_tools import session  # noqa: F401  imported before the fork, as in the zygote

    read_end, write_end = os.pipe()
    base_bytes = _anon_bytes(os.getpid())
    child = os.fork()
    if child == 0:
        os.close(read_end)
        try:
            answer = _smoke(order) if order["mode"] == "smoke" else _measure(order)
        except SessionError as error:
            answer = {"error": error.detail, "reason": error.reason}
        os.write(write_end, json.dumps(answer).encode())
        os._exit(0)
    os.close(write_end)
    peak_bytes = _watch(child)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    raw = b""
    while chunk := os.read(read_end, 1 << 16):
        raw += chunk
    if code != 0 or not raw:
        sys.stderr.write("the measured process died\n")
        os.kill(os.getpid(), -code) if code < 0 else sys.exit(code or 1)
    answer = json.loads(raw)
    if "steady_bytes" in answer:
        grown = answer.pop("anon_end_bytes")
        answer["peak_bytes"] = answer["steady_bytes"] + max(0, peak_bytes - grown)
        answer["base_bytes"] = base_bytes
    sys.stdout.write(json.dumps(answer) + "\n")


def _watch(child: int) -> int:
    """Return the highest anonymous memory of the child until it ends, sampled every millisecond."""
    peak = 0
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        peak = max(peak, _anon_bytes(child))
        time.sleep(0.001)
    return peak


def _anon_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("RssAnon:")), 0)


def _private_bytes() -> int:
    """Return the private dirty memory of this process: what it adds to the one that it was forked from."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Private_Dirty:"))


def _inputs(order: dict[str, Any]) -> dict[str, dict[str, Array]]:
    import numpy as np

    found: dict[str, dict[str, Array]] = {}
    with np.load(order["inputs"], allow_pickle=False) as arrays:
        for key in arrays.files:
            kind, _, name = key.partition("/")
            array = arrays[key]
            found.setdefault(kind, {})[name] = array.astype(object) if array.dtype.kind == "U" else array
    return found


def _smoke(order: dict[str, Any]) -> dict[str, Any]:
    from edgeinfer_tools.session import Runner

    typical = _inputs(order)["typical"]
    for optimize in (False, True):
        Runner(Path(order["model"]), state=_state(order), optimize=optimize).run(typical)
    return {"loaded": True}


def _measure(order: dict[str, Any]) -> dict[str, Any]:
    from edgeinfer_tools.session import Runner

    inputs = _inputs(order)
    begun = time.perf_counter_ns()
    runner = Runner(Path(order["model"]), threads=order["threads"], state=_state(order))
    load_ms = (time.perf_counter_ns() - begun) / 1e6
    _trim()
    for _ in range(WARM_UP):
        runner.run(inputs["typical"])
    until = time.perf_counter() + order["seconds"]
    micros: list[float] = []
    cpu_begun = time.process_time_ns()
    while len(micros) < MIN_RUNS or (time.perf_counter() < until and len(micros) < MAX_RUNS):
        begun = time.perf_counter_ns()
        runner.run(inputs["typical"])
        micros.append((time.perf_counter_ns() - begun) / 1e3)
    cpu_us = (time.process_time_ns() - cpu_begun) / 1e3 / len(micros)
    for _ in range(2):
        runner.run(inputs["largest"])
    _trim()
    return {"load_ms": load_ms, "latency_us": micros, "cpu_us_per_run": cpu_us, "steady_bytes": _private_bytes(),
            "anon_end_bytes": _anon_bytes(os.getpid())}  # fmt: skip


def _state(order: dict[str, Any]) -> list[StateSpec]:
    return [StateSpec(*fields) for fields in order["state"]]


def _trim() -> None:
    """Give freed memory back to the kernel, as a worker does after loading."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:  # not glibc
        return


if __name__ == "__main__":
    main()
