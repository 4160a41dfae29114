"""Say which models the gateway offers, and write the protocol's metadata about them from their manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeinfer.artifact.manifest import Manifest, TensorSpec
from edgeinfer.request import Reason, Refusal

PLATFORM = "onnxruntime_onnx"
"""The protocol's word for an ONNX model run by ONNX Runtime."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model version that requests may name; the first of a name is its active version."""

    manifest: Manifest
    digest: str
    ready: bool
    """Whether a request would be run now, here or next door."""
    detail: str = ""
    """Why it is not ready, for people."""


def find_model(models: Sequence[ModelInfo], name: str, version: str | None) -> ModelInfo | None:
    """Return the model of that name: the version asked for, else the active one."""
    for model in models:
        if model.manifest.name == name and version in {None, model.manifest.version}:
            return model
    return None


def describe_models(models: Sequence[ModelInfo]) -> str:
    """Return the names and versions there are, for error texts."""
    return ", ".join(f"{model.manifest.name} {model.manifest.version}" for model in models) or "none"


def unknown_model(name: str, version: str | None, models: Sequence[ModelInfo]) -> Refusal:
    """Return the refusal of a request for a model that there is not."""
    what = f"model {name[:64]!r}" + (f" version {version[:64]!r}" if version else "")
    return Refusal(Reason.MODEL_UNAVAILABLE, f"there is no {what}; there are: {describe_models(models)}")


def index(models: Sequence[ModelInfo]) -> list[dict[str, Any]]:
    """Return the list of models, as Triton's repository index writes it."""
    return [
        {
            "name": model.manifest.name,
            "version": model.manifest.version,
            "state": "READY" if model.ready else "UNAVAILABLE",
            "reason": model.detail,
        }
        for model in models
    ]


def metadata(model: ModelInfo, models: Sequence[ModelInfo]) -> dict[str, Any]:
    """Return the protocol's metadata of one model; everything beyond it stands in `parameters`."""
    manifest = model.manifest
    return {
        "name": manifest.name,
        "versions": [other.manifest.version for other in models if other.manifest.name == manifest.name],
        "platform": PLATFORM,
        "inputs": [_tensor(spec) for spec in manifest.inputs],
        "outputs": [_tensor(spec) for spec in manifest.outputs],
        "parameters": {
            "active_version": manifest.version,
            "digest": model.digest,
            "task": manifest.task,
            "description": manifest.description,
            "deadline_ms": manifest.deadline_ms,
            "stateful": manifest.stateful,
            "labels": manifest.classes.labels if manifest.classes else [],
            "variants": [variant.name for variant in manifest.variants],
            "ready": model.ready,
            "detail": model.detail,
        },
    }


def _tensor(spec: TensorSpec) -> Mapping[str, Any]:
    described: dict[str, Any] = {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape}
    parameters: dict[str, Any] = {}
    if spec.max_shape:
        parameters["max_shape"] = spec.max_shape
    if spec.decode is not None:
        parameters["decode"] = spec.decode.kind
        if spec.decode.sample_rate_hz:
            parameters["sample_rate_hz"] = spec.decode.sample_rate_hz
    if parameters:
        described["parameters"] = parameters
    return described
