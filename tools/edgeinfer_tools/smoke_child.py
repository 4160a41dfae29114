"""The child of `smoke`: load and run one model, say how it went. Runs in any Python that has NumPy and onnxruntime.

So it imports nothing of ours: it may be started by the interpreter of a device's older runtime.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["ORT_DISABLE_TELEMETRY"] = "1"


def main(order: dict[str, Any]) -> dict[str, Any]:
    """Return the runtime's version, and what failed if something did."""
    import numpy as np

    try:
        import onnxruntime as ort
    except ImportError as error:
        return {"reason": "runtime_unusable", "detail": str(error)}
    found: dict[str, Any] = {"onnxruntime": ort.__version__, "disagreement": 0.0}
    with np.load(order["inputs"], allow_pickle=False) as arrays:
        inputs = {n: arrays[n].astype(object) if arrays[n].dtype.kind == "U" else arrays[n] for n in arrays.files}
    for name, datatype, shape in order["state"]:
        inputs[name] = np.zeros(shape, datatype)
    levels = ort.GraphOptimizationLevel
    answers = []
    for level in (levels.ORT_DISABLE_ALL, levels.ORT_ENABLE_ALL):
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        stage = "load_failed"
        try:
            session = ort.InferenceSession(order["model"], options, providers=["CPUExecutionProvider"])
            stage = "run_failed"
            answers.append(session.run(None, inputs))
        except Exception as error:  # noqa: BLE001  ONNX Runtime's errors share no other base
            return {**found, "reason": stage, "detail": str(error)}
    for plain, fused in zip(*answers):  # noqa: B905  old Pythons do not know `strict`
        if isinstance(plain, np.ndarray) and plain.dtype.kind == "f" and plain.size and plain.shape == fused.shape:
            largest, apart = float(np.abs(plain).max()), float(np.abs(plain - fused).max())
            if np.isfinite(apart) and largest > 0:
                found["disagreement"] = max(found["disagreement"], apart / largest)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
