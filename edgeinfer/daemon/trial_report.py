"""Say what a trial has shown: for people, and as the beginning of a recipe. Pure.

Figures that a device would need and that a trial can only guess are marked so; `edgeinfer-tools build` measures them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeinfer.artifact.manifest import SCHEMA, File, Manifest, Runtime, TensorSpec, Variant
from edgeinfer.daemon.trial_inputs import picture_of
from edgeinfer.errors import mib


def unverified_manifest(
    model: Path,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    onnxruntime: str,
    peak_bytes: int,
    steady_bytes: int,
) -> Manifest:
    """Return what a manifest would say of a bare model, marked `unverified`: no bundle is made of it."""
    with model.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    name = model_name(model)
    return Manifest(
        schema=SCHEMA,
        name=name,
        version="0.0.0",
        task="unknown",
        inputs=list(inputs),
        outputs=list(outputs),
        variants=[
            Variant(name="bare", file=model.name, quality=1.0, load_peak_bytes=peak_bytes, steady_bytes=steady_bytes)
        ],
        runtime=Runtime(onnxruntime=onnxruntime, opset=0, ir_version=0),
        files={model.name: File(digest, model.stat().st_size)},
        metadata={"unverified": "true"},
    )


def model_name(model: Path) -> str:
    """Return a bundle's name made of the file's."""
    return re.sub(r"[^a-z0-9._-]+", "-", model.stem.lower()).strip("._-")[:64] or "model"


def recipe(manifest: Manifest, states: Sequence[tuple[TensorSpec, TensorSpec]], main: str) -> str:
    """Return the beginning of a recipe.toml; what only a person can say is left open, with a comment."""
    (variant,) = manifest.variants
    taken = {spec.name for pair in states for spec in pair}
    lines = [
        f"name = {json.dumps(manifest.name)}",
        'version = "1.0.0"',
        'task = "?"  # what it is for',
        "",
        "[source]",
        f"file = {json.dumps(variant.file)}",
    ]
    for spec in manifest.inputs:
        if spec.name not in taken:
            lines += ["", "[[inputs]]", *_tensor(spec), *_decoding(spec, main)]
    for spec in manifest.outputs:
        if spec.name not in taken:
            lines += ["", "[[outputs]]", *_tensor(spec)]
    for given, kept in states:
        lines += ["", "[[state]]  # it looks like one: is it?", f"input = {json.dumps(given.name)}"]
        lines += [f"output = {json.dumps(kept.name)}", f'datatype = "{given.datatype}"', f"shape = {given.bound}"]
    lines += ["", "[[variants]]", 'name = "fp32"', 'method = "keep"', ""]
    lines += ["# Beside it: data.py with evaluation data, [[gates]] that a quantized variant has to pass."]
    return "\n".join(lines) + "\n"


def _tensor(spec: TensorSpec) -> list[str]:
    lines = [f"name = {json.dumps(spec.name)}", f'datatype = "{spec.datatype}"', f"shape = {spec.shape}"]
    if spec.max_shape:
        lines.append(f"max_shape = {spec.max_shape}  # as it was tried; the largest that a device may be sent")
    return lines


def _decoding(spec: TensorSpec, main: str) -> list[str]:
    if spec.decode is not None:
        return ["", "[inputs.decode]", f'kind = "{spec.decode.kind}"']
    if picture_of(spec.bound) is not None:
        return ["# For JPEGs, bake resizing and scaling into the graph (graph.py): they come as UINT8 [1, H, W, 3]."]
    if spec.name == main and spec.datatype == "FP32" and len(spec.bound) == 2:
        return ["", "[inputs.decode]", 'kind = "audio"', "sample_rate_hz = 16000  # is it?"]
    return []


def describe(report: Mapping[str, Any]) -> str:
    """Return the report for people."""
    how = f"{report['runs']} runs on {report['source']}, {report['threads']} threads"
    runtime = f"onnxruntime {report['onnxruntime']} ({', '.join(report['providers'])})"
    lines = [f"{report['model']}: {how}, {runtime}; unverified, on this device only"]
    for role, seen in (("inputs", "tried"), ("outputs", "seen")):
        for tensor in report[role]:
            as_seen = tensor[seen] is None or tensor[seen] == tensor["shape"]
            size = "" if as_seen else f" {seen} as {tensor[seen]}"
            filled = f", {tensor['from']}" if "from" in tensor else ""
            lines.append(f"  {role[:-1]:<8}{tensor['name']}  {tensor['datatype']} {tensor['shape']}{size}{filled}")
    lines.append(f"  load    {report['load_ms']:.1f} ms")
    lines.append(
        f"  memory  {mib(report['steady_bytes'])} between runs, {mib(report['peak_bytes'])} at the peak, "
        f"the file has {mib(report['file_bytes'])}"
    )
    if report["latency_ms"] is not None:
        spread = "  ".join(f"{name} {value:.3f}" for name, value in report["latency_ms"].items())
        lines.append(f"  run ms  {spread}  (first {report['first_run_ms']:.3f})")
    if report["finite"] is not None:
        bad = ", ".join(f"{name} in {count} runs" for name, count in report["non_finite"].items())
        lines.append(f"  outputs {'finite' if report['finite'] else f'NaN OR INFINITE: {bad}'}")
    if report["failures"]:
        lines.append(f"  failed  {', '.join(f'{reason} {count}' for reason, count in report['failures'].items())}")
    if report["runs"]:  # of a model that never ran nothing is known that a recipe could say
        lines += ["", "A recipe for it would begin:", "", report["recipe"]]
    if report["problem"]:  # last, where it is seen
        lines.append(f"  problem {report['problem']}" if not report["runs"] else f"problem: {report['problem']}")
    return "\n".join(lines)
