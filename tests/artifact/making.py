"""Make small, sound bundles on disk, and break them, for tests of everything that reads bundles."""

from __future__ import annotations

import hashlib
from pathlib import Path

from edgeinfer import oip
from edgeinfer.artifact.bundle import encode_golden
from edgeinfer.artifact.manifest import (
    File,
    Golden,
    Manifest,
    Runtime,
    TensorSpec,
    Variant,
    encode_manifest,
)

# ModelProto { ir_version: 8, graph: GraphProto { name: "g" } }
ONNX = b"\x08\x08\x3a\x03\x12\x01g"


def make_bundle(
    folder: Path,
    *,
    name: str = "tiny",
    version: str = "1.0.0",
    files: dict[str, bytes] | None = None,
    model: bytes = ONNX,
    description: str = "",
) -> Manifest:
    """Write a bundle whose `files` (beside the model and one golden pair) are as given."""
    contents = {
        "model/fp32.onnx": model,
        "golden/000.request": encode_golden(oip.encode_request([("x", "FP32", [1], b"\0\0\x80\x3f")])),
        "golden/000.response": encode_golden(oip.encode_response([("y", "FP32", [1], b"\0\0\0\x40")])),
        **(files or {}),
    }
    manifest = Manifest(
        schema=1,
        name=name,
        version=version,
        task="test",
        inputs=[TensorSpec("x", "FP32", [1])],
        outputs=[TensorSpec("y", "FP32", [1])],
        variants=[Variant(name="fp32", file="model/fp32.onnx", quality=1.0, load_peak_bytes=2, steady_bytes=1)],
        runtime=Runtime(onnxruntime="1.32.0", opset=17, ir_version=8),
        files={path: File(hashlib.sha256(data).hexdigest(), len(data)) for path, data in contents.items()},
        golden=[Golden("golden/000.request", "golden/000.response")],
        description=description,
    )
    for path, data in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    (folder / "manifest.json").write_bytes(encode_manifest(manifest))
    return manifest


def listing(folder: Path) -> dict[str, bytes]:
    """Return every plain file below a folder and its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
