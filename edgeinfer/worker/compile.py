"""Write a model in the form that this device loads fastest, and load a model that was written so.

Worker's side. Two forms, both with the weights in a file beside the model that sessions map instead of copying:

    prepacked   the weights as this CPU's kernels want them; full speed, the file is 1 to 6 times as large
    mapped      the weights as they are, and sessions that pack nothing; fastest to load, some kernels run slower

Both hold for one CPU and one version of ONNX Runtime only. Which one is used, if any, is measured and decided on the
daemon's side, as is where the files lie; here they are written, synced, and checked to be what was asked for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import onnxruntime as ort

from edgeinfer.artifact.external_data import external_locations
from edgeinfer.errors import ArtifactError
from edgeinfer.worker.fault import Fault
from edgeinfer.worker.messages import Compile, LoadSpec

COMPILE_FAILED: Final = "compile_failed"

_MIN_EXTERNAL_BYTES: Final = 1024
"""Smaller tensors stay in the model file: each one outside costs a page and a mapping."""
_ERRORS_ONLY: Final = 3


def prepare(spec: LoadSpec, options: ort.SessionOptions) -> dict[str, str]:
    """Set what the form of `spec` needs, and return the session config entries for it."""
    entries = {"session.disable_prepacking": "1"} if spec.form == "mapped" else {}
    if spec.compile is None:
        if spec.form != "plain":  # it was optimized when it was written: again would only take time
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        return entries
    options.optimized_model_filepath = spec.compile.model_path
    options.log_severity_level = _ERRORS_ONLY  # it warns that the file is for this hardware, which is the purpose
    entries["session.optimized_model_external_initializers_file_name"] = spec.compile.weights_file
    entries["session.optimized_model_external_initializers_min_size_in_bytes"] = str(_MIN_EXTERNAL_BYTES)
    if spec.form == "prepacked":
        entries["session.save_external_prepacked_constant_initializers"] = "1"
    return entries


def settle(spec: LoadSpec, order: Compile) -> None:
    """Make what the session has written durable, once it is what was asked for.

    ONNX Runtime accepts unknown config entries in silence, so that it wrote the weights beside the model is checked.

    Raises:
        Fault: `compile_failed`.
    """
    model, weights = Path(order.model_path), Path(order.model_path).parent / order.weights_file
    try:
        locations = external_locations(model)
        if locations != {order.weights_file}:
            kept = ", ".join(sorted(locations)) or "the model file itself"
            raise Fault(COMPILE_FAILED, f"{spec.title}: the weights were written to {kept}, not {order.weights_file}")
        for path in (weights, model):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except (ArtifactError, OSError) as error:
        raise Fault(COMPILE_FAILED, f"{spec.title} in form {spec.form} was not written: {error}") from error
