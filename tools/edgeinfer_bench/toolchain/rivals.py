"""Start each maker in a process of its own, and get NNCF a virtual environment.

What cannot be installed, fails or takes too long is an `Attempt` without a file and with the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edgeinfer_bench.peer import PeerMissing, environment

ROOT: Final = Path(__file__).resolve().parents[3]
NNCF: Final = ROOT / "build" / "peers" / "nncf"
REQUIREMENTS: Final = (
    "nncf==3.4.0", "openvino==2026.4.1", "onnx==1.23.2", "onnxruntime==1.32.0",
    "numpy>=2,<3", "msgspec>=0.23,<0.24", "cattrs>=26.2,<27", "psutil>=7.2,<8", "pillow>=12", "h11>=0.16,<0.17",
    "onnx-ir>=1.1,<2", "rapidfuzz>=3.14,<4", "pycocotools>=2.0.11,<3", "rich>=15,<16", "paho-mqtt>=2.2,<3",
)  # fmt: skip
"""NNCF, and what reading recipes and judging takes: the very same code judges there."""
EXPORT_PYTHON: Final = ROOT / "build" / "export" / "bin" / "python"
PEERS: Final = ("ort-static", "ort-dynamic", "nncf")
TITLES: Final = {
    "float": "float",
    "ort-static": "ONNX Runtime static",
    "ort-dynamic": "ONNX Runtime dynamic",
    "nncf": "NNCF 3.4.0, accuracy control",
}
TIMEOUT_S: Final = 120.0
"""NNCF tries one operator after the other where the bar is missed."""
BUILD_TIMEOUT_S: Final = 400.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One maker's go at one recipe."""

    maker: str
    path: Path | None
    """What it made; None with `reason`."""
    seconds: float | None = None
    peak_bytes: int | None = None
    facts: Mapping[str, Any] | None = None
    reason: str = ""


def run_maker(
    method: str, recipe: Path, float_model: Path, out: Path, *, environ: Mapping[str, str] | None = None
) -> Attempt:
    """Let one maker make its artefact at `out`."""
    python = Path(sys.executable)
    if method == "nncf":
        try:
            python = environment(NNCF, REQUIREMENTS) / "bin" / "python"
        except PeerMissing as error:
            return Attempt(method, None, reason=str(error))
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tools'}", "ORT_DISABLE_TELEMETRY": "1"}
    variables |= {"PYTHONDONTWRITEBYTECODE": "1", **(environ or {})}
    if EXPORT_PYTHON.exists():
        variables.setdefault("EDGEINFER_EXPORT_PYTHON", str(EXPORT_PYTHON))
    argv = [str(python), "-m", "edgeinfer_bench.toolchain.make", method, str(recipe), str(float_model), str(out)]
    limit = BUILD_TIMEOUT_S if method == "ours" else TIMEOUT_S
    try:
        done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return Attempt(method, None, seconds=limit, reason=f"not done within {limit:g} s")
    try:
        facts = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = "".join(done.stderr.strip().splitlines()[-1:])
        return Attempt(method, None, reason=f"its process ended with {done.returncode}: {last[:160]}")
    reason = facts.get("reason", "")
    return Attempt(method, None if reason else out, facts["seconds"], facts["peak_bytes"], facts, reason)
