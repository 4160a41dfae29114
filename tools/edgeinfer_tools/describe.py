"""Write down what a build found: manifest, report and profile.

Pure: everything is measured before. No time, path or host name enters a file of the bundle, so that equal inputs and
costs give an equal bundle digest.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import onnx

from edgeinfer.artifact.manifest import SCHEMA as MANIFEST_SCHEMA
from edgeinfer.artifact.manifest import Golden, Manifest, Provenance, Runtime, Variant
from edgeinfer.artifact.profile import SCHEMA as PROFILE_SCHEMA
from edgeinfer.artifact.profile import Profile
from edgeinfer_tools.model_file import size_bytes
from edgeinfer_tools.pack import file_table
from edgeinfer_tools.prepare import Prepared
from edgeinfer_tools.runtimes import opset_of
from edgeinfer_tools.session import ORT_VERSION
from edgeinfer_tools.targets import weight_range
from edgeinfer_tools.variants import Built, Job, preferred

REPORT_SCHEMA = 1


def manifest(job: Job, built: list[Built], golden: list[Golden], model: onnx.ModelProto) -> Manifest:
    """Return the manifest of what lies in the staging folder."""
    file, source = job.recipe.file, job.recipe.file.source
    return Manifest(
        schema=MANIFEST_SCHEMA,
        name=file.name,
        version=file.version,
        task=file.task,
        inputs=job.recipe.inputs,
        outputs=job.recipe.outputs,
        state=job.recipe.state,
        classes=job.recipe.classes,
        variants=[_variant(item) for item in built],
        runtime=Runtime(
            onnxruntime=file.onnxruntime or ORT_VERSION, opset=opset_of(model), ir_version=int(model.ir_version)
        ),
        files=file_table(job.folder),
        golden=golden,
        deadline_ms=file.deadline_ms,
        description=file.description,
        provenance=Provenance(
            source=", ".join([source.origin, *(wheel.pypi for wheel in source.packages)])
            if source
            else f"made by models/{job.recipe.folder.name}/graph.py",
            license=(source.license if source else "") or file.license,
            revision=file.revision or (source.revision if source else ""),
            data=", ".join(item.origin for item in file.data),
        ),
        metadata={"board": job.board.name},
    )


def _variant(item: Built) -> Variant:
    return Variant(
        name=item.recipe.name,
        file=item.file,
        quality=item.quality,
        load_peak_bytes=max(cost.load_peak_bytes for cost in item.costs),
        steady_bytes=max(cost.steady_bytes for cost in item.costs),
        latency_us={str(cost.threads): cost.latency.p99_us for cost in item.costs},
        providers=item.recipe.providers,
        provider_options=item.recipe.provider_options,
        instruction_sets=list(item.quantized.instruction_sets),
        tolerance=item.tolerance,
    )


def report(job: Job, built: list[Built], notes: list[str], *, source_sha256: str, prepared: Prepared) -> dict[str, Any]:
    """Return report.json: what was done and what was measured, for people and for `inspect`."""
    weights = weight_range(job.board)
    return {
        "schema": REPORT_SCHEMA,
        "model": job.recipe.file.name,
        "version": job.recipe.file.version,
        "board": job.board.name,
        "source_sha256": source_sha256,
        "machine": {"cpu": job.machine.cpu, "architecture": platform.machine()},
        "versions": {"onnxruntime": ORT_VERSION, "onnx": onnx.__version__, "numpy": np.__version__},
        "weights": {"reduced_range": weights.reduced, "reason": weights.reason},
        "notes": notes,
        "preferred": {"variant": (choice := preferred(built)).name, "reason": choice.reason},
        "float_size_bytes": size_bytes(job.float_model),
        "preparation": prepared.report,
        "variants": [_variant_report(item) for item in built],
    }


def _variant_report(item: Built) -> dict[str, Any]:
    return {
        "name": item.recipe.name,
        "method": item.recipe.method,
        "size_bytes": item.size_bytes,
        "scheme": item.quantized.scheme.text(),
        "size_ratio": _figure(item.quantized.ratio),
        "calibrator": item.quantized.calibrator,
        "calibration_samples": item.quantized.calibration_samples,
        "stayed_float": {
            "multiplications_share": _figure(item.quantized.coverage.float_macs_share),
            "weights_share": _figure(item.quantized.coverage.float_weights_share),
            "in_bodies": item.quantized.coverage.bodies,
            "by_operator": item.quantized.coverage.by_operator,
            "kept_on_purpose": list(item.quantized.scheme.exclude),
        },
        "runtime": item.quantized.runtime,
        "evaluation": {
            "streams": item.evaluation.streams,
            "requests": item.evaluation.requests,
            "confusion": dict(item.evaluation.confusion),
        },
        "gates": [
            {
                "metric": gate.metric,
                "output": gate.output,
                "value": _figure(gate.value),
                "minimum": gate.minimum,
                "maximum": gate.maximum,
            }
            for gate in item.gates
        ],
        "errors": {
            name: {"max_abs": _figure(error.max_abs), "mean_abs": _figure(error.mean_abs)}
            for name, error in item.evaluation.errors.items()
        },
        "golden_spread": _figure(item.golden.spread),
        "tolerance": item.tolerance,
        "costs": item.costs,
    }


def _figure(value: float) -> float:
    """Six significant digits."""
    return float(f"{value:.6g}")


def profile(job: Job, built: list[Built], *, bundle_digest: str) -> Profile:
    """Return the costs as a profile: an estimate for the board, unless the board itself has measured them."""
    given = job.costs_from
    return Profile(
        schema=PROFILE_SCHEMA,
        model=job.recipe.file.name,
        version=job.recipe.file.version,
        bundle_digest=bundle_digest,
        board=job.board.name,
        machine=job.machine.cpu,
        cpu_flags=job.machine.flags,
        onnxruntime=ORT_VERSION,
        origin=given.origin if given is not None else "estimated",
        costs=[cost for item in built for cost in item.costs],
        estimate_model=given.estimate_model
        if given is not None
        else "as measured on the build machine, not scaled to the board",
    )
