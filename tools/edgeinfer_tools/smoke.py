"""Load and run a model in a throw-away process, with and without graph optimisation, before anything is claimed of it.

A quantizer that "succeeded" may have written a graph that the runtime cannot load, or that kills the process. The
child's half is at the end of this file: `python -m edgeinfer_tools.smoke ORDER`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgeinfer.artifact.manifest import StateSpec
from edgeinfer.errors import SessionError
from edgeinfer_tools.samples import Array

TIMEOUT_S = 300


def smoke(model: Path, inputs: dict[str, Array], state: list[StateSpec]) -> None:
    """Return when the model loads and runs at both ends of the optimiser's range.

    Raises:
        SessionError: it does not, or the process died or hung over it.
    """
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder) / "inputs.npz"
        plain = {name: array.astype(str) if array.dtype == np.object_ else array for name, array in inputs.items()}
        with arrays.open("wb") as file:
            np.savez(file, **plain)  # type: ignore[arg-type]
        order = {"model": str(model), "inputs": str(arrays), "state": [msgspec.to_builtins(spec) for spec in state]}
        command = [sys.executable, "-m", "edgeinfer_tools.smoke", json.dumps(order)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise SessionError("timeout", f"{model.name} did not load and run in {TIMEOUT_S} s") from error
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        last = "".join(done.stderr.strip().splitlines()[-1:])
        raise SessionError("crashed", f"{model.name} ended its process with {how}: {last}") from None
    if "reason" in answer:
        raise SessionError(answer["reason"], f"{model.name}: {answer['detail']}")


def _child(order: dict[str, Any]) -> dict[str, str]:
    from edgeinfer_tools.session import Level, Runner

    with np.load(order["inputs"], allow_pickle=False) as arrays:
        inputs = {
            name: arrays[name].astype(object) if arrays[name].dtype.kind == "U" else arrays[name] for name in arrays
        }
    state = msgspec.convert(order["state"], list[StateSpec])
    try:
        ends: tuple[Level, ...] = ("none", "all")
        for level in ends:
            Runner(Path(order["model"]), state=state, level=level).run(inputs)
    except SessionError as error:
        return {"reason": error.reason, "detail": error.detail}
    return {}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_child(json.loads(sys.argv[1]))) + "\n")
