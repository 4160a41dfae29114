"""Read a finished bundle back and prove it, as the device will: manifest, digests, golden answers of every variant.

Runs on the staged directory before it is published, and on any bundle that `edgeinfer-tools inspect --verify` names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer import oip
from edgeinfer.artifact.manifest import MANIFEST_FILE, SIGNATURE_FILE, Manifest, read_manifest
from edgeinfer.errors import DigestMismatch, SessionError
from edgeinfer_tools.fetch import sha256
from edgeinfer_tools.golden import read_golden
from edgeinfer_tools.samples import NUMPY_TYPES, Array, Media, decode_inputs
from edgeinfer_tools.session import Runner


def verify_bundle(bundle: Path) -> tuple[Manifest, str]:
    """Return manifest and bundle digest of a bundle that holds what it promises.

    Raises:
        ArtifactError: the manifest or a file is not right.
        SessionError: a variant does not load, does not run, or misses a golden answer.
    """
    manifest, digest = read_manifest(bundle)
    check_files(bundle, manifest)
    for variant in manifest.variants:
        runner = Runner(bundle / variant.file, state=manifest.state)
        for golden in manifest.golden:
            runner.reset()
            got = runner.run(_golden_inputs((bundle / golden.request).read_bytes(), manifest))
            header, body = read_golden((bundle / golden.response).read_bytes())
            response, payload = oip.decode_response(header, body)
            for tensor, raw in zip(response.outputs, payload.tensors, strict=True):
                want = _array(tensor, raw)
                _compare(got[tensor.name], want, f"variant {variant.name}: {golden.request}: {tensor.name}", variant.tolerance)
    return manifest, digest


def check_files(bundle: Path, manifest: Manifest) -> None:
    """Hold every file against the manifest's table.

    Raises:
        DigestMismatch: a file is missing, too many, or has other bytes.
    """
    found = {str(path.relative_to(bundle)) for path in bundle.rglob("*") if not path.is_dir()}
    if extra := sorted(found - set(manifest.files) - {MANIFEST_FILE, SIGNATURE_FILE}):
        raise DigestMismatch(f"{bundle}: {', '.join(extra)} not in the manifest")
    for name, declared in manifest.files.items():
        path = bundle / name
        if not path.is_file() or path.is_symlink():
            raise DigestMismatch(f"{path}: the manifest names it, it is not there as a plain file")
        data = path.read_bytes()
        if len(data) != declared.size_bytes or sha256(data) != declared.sha256:
            raise DigestMismatch(f"{path}: {len(data)} bytes, sha256 {sha256(data)[:12]}…; the manifest says "
                                 f"{declared.size_bytes} bytes, {declared.sha256[:12]}…")  # fmt: skip


def _golden_inputs(data: bytes, manifest: Manifest) -> dict[str, Array]:
    request, payload = oip.decode_request(*read_golden(data))
    inputs: dict[str, Any] = {}
    for tensor, raw in zip(request.inputs, payload.tensors, strict=True):
        content_type = tensor.parameters.get("content_type")
        if content_type:
            inputs[tensor.name] = Media(bytes(oip.bytes_elements(raw)[0]), str(content_type))
        else:
            inputs[tensor.name] = _array(tensor, raw)
    return decode_inputs(inputs, manifest.inputs)


def _array(tensor: oip.Tensor, raw: bytes | bytearray | memoryview) -> Array:
    if tensor.datatype == "BYTES":
        array = np.empty(len(items := oip.elements(tensor, raw)), dtype=object)
        array[:] = items
        return array.reshape(tensor.shape)
    return np.frombuffer(raw, NUMPY_TYPES[tensor.datatype]).reshape(tensor.shape)


def _compare(got: Array, want: Array, where: str, tolerance: float) -> None:
    if got.shape != want.shape or got.dtype != want.dtype:
        raise SessionError("golden", f"{where} is {got.dtype} {got.shape}, expected {want.dtype} {want.shape}")
    if want.dtype == np.object_:
        if not np.array_equal(got, want):
            raise SessionError("golden", f"{where} differs")
    elif want.size:
        difference = float(np.abs(got.astype(np.float64) - want.astype(np.float64)).max())
        if not difference <= tolerance:
            raise SessionError("golden", f"{where} differs by {difference:.4g}, the tolerance is {tolerance:.4g}")
