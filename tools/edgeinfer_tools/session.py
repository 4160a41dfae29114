"""Run an ONNX file here as a worker does there: explicit threads, no spinning, state carried from run to run.

ONNX Runtime must be imported with its telemetry off (DESIGN: no byte may leave a machine unasked), so it is imported
here and nowhere else in the toolchain but the measuring child.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edgeinfer.artifact.manifest import StateSpec
from edgeinfer.artifact.provider import CPU_PROVIDER
from edgeinfer.errors import SessionError
from edgeinfer.worker.fault import Fault
from edgeinfer.worker.messages import LoadSpec
from edgeinfer_tools.faults import plain
from edgeinfer_tools.samples import NUMPY_TYPES, Array

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # before the import: the wheel otherwise starts a telemetry thread

import onnxruntime as ort

from edgeinfer.worker.providers import choose  # imports onnxruntime too

ORT_VERSION: str = ort.__version__

Level = Literal["none", "basic", "extended", "all"]
"""How far the runtime optimises a graph when it loads it; workers load with `all`."""
_LEVELS: dict[Level, ort.GraphOptimizationLevel] = {
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


class Runner:
    """One model, loaded; not for use by two threads.

    Keeps the state tensors between runs, from zeros, until `reset`.
    """

    def __init__(
        self,
        model: Path | bytes,
        *,
        threads: int = 1,
        state: list[StateSpec] | None = None,
        level: Level = "all",
        providers: Sequence[str] = (CPU_PROVIDER,),
        provider_options: Mapping[str, dict[str, str]] | None = None,
    ) -> None:
        """Load the model, on the execution providers that a worker would use.

        Raises:
            SessionError: the runtime rejects it.
        """
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.graph_optimization_level = _LEVELS[level]
        order = LoadSpec(
            model="model" if isinstance(model, bytes) else model.stem,
            version="0.0.0",
            variant="here",
            path="" if isinstance(model, bytes) else str(model),
            providers=list(providers),
            provider_options=dict(provider_options or {}),
            intra_threads=threads,
        )
        try:
            self._session: Any = ort.InferenceSession(
                model if isinstance(model, bytes) else str(model), options, providers=choose(order, options)
            )
        except Fault as fault:
            raise SessionError(fault.reason, fault.detail) from fault
        except Exception as error:  # ONNX Runtime's errors share no other base
            raise SessionError("load_failed", plain(str(error))) from error
        self.outputs: list[str] = [item.name for item in self._session.get_outputs()]
        self.inputs: list[str] = [item.name for item in self._session.get_inputs()]
        self._state_specs = state or []
        self._state: dict[str, Array] = {}
        self.reset()

    def reset(self) -> None:
        """Begin a new stream: all state is zeros again."""
        self._state = {spec.input: np.zeros(spec.shape, NUMPY_TYPES[spec.datatype]) for spec in self._state_specs}

    def state(self) -> dict[str, Array]:
        """Return the state that the next run will take."""
        return dict(self._state)

    def output_types(self) -> dict[str, str]:
        """Return the type of each output in the runtime's words: `tensor(float)`."""
        return {item.name: item.type for item in self._session.get_outputs()}

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the public outputs by name.

        Raises:
            SessionError: the run failed.
        """
        try:
            values = self._session.run(None, {**inputs, **self._state})
        except Exception as error:  # as above
            raise SessionError("run_failed", plain(str(error))) from error
        found = dict(zip(self.outputs, values, strict=True))
        for spec in self._state_specs:
            self._state[spec.input] = found.pop(spec.output)
        return found
