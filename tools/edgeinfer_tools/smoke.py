"""Load and run a model in a throw-away process, with and without graph optimisation, before anything is claimed of it.

A quantizer that "succeeded" may have written a graph that the runtime cannot load, or that kills the process. The
child may be another Python with the device's own, older runtime: see `smoke_child`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.artifact.manifest import StateSpec
from edgeinfer.errors import RuntimeUnusable, SessionError
from edgeinfer_tools import smoke_child
from edgeinfer_tools.faults import plain
from edgeinfer_tools.samples import NUMPY_TYPES, Array

TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Proof:
    """A model loaded and ran, without and with graph optimisation."""

    onnxruntime: str
    """The version in which it did."""
    disagreement: float
    """Largest difference between the two, as a share of the largest output."""


def smoke(model: Path, inputs: Mapping[str, Array], state: list[StateSpec], *, python: Path | None = None) -> Proof:
    """Return when the model loads and runs, at both ends of the optimiser's range.

    `python` is the interpreter that has the runtime; this one when it is None.

    Raises:
        SessionError: it does not, or the process died or hung over it.
    """
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "1"}
    if python is None:
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder) / "inputs.npz"
        texts = {name: array.astype(str) if array.dtype == np.object_ else array for name, array in inputs.items()}
        with arrays.open("wb") as file:
            np.savez(file, **texts)  # type: ignore[arg-type]
        states = [(spec.input, np.dtype(NUMPY_TYPES[spec.datatype]).name, spec.shape) for spec in state]
        order = {"model": str(model), "inputs": str(arrays), "state": states}
        command = [str(python or sys.executable), str(Path(smoke_child.__file__).resolve()), json.dumps(order)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise SessionError("timeout", f"{model.name} did not load and run in {TIMEOUT_S} s") from error
        except OSError as error:
            raise RuntimeUnusable(f"{python} cannot be started: {error.strerror}") from error
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        last = "".join(done.stderr.strip().splitlines()[-1:])
        raise SessionError("crashed", f"{model.name} ended its process with {how}: {last}") from None
    if answer.get("reason") == "runtime_unusable":
        raise RuntimeUnusable(f"{python or sys.executable}: {answer['detail']}")
    if "reason" in answer:
        where = f"onnxruntime {answer['onnxruntime']}: " if python is not None else ""
        raise SessionError(answer["reason"], f"{model.name}: {where}{plain(answer['detail'])}")
    return Proof(str(answer["onnxruntime"]), float(answer["disagreement"]))
